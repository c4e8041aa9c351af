"""Finding out what a training loop needs of its gradients, without getting in its way."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gradweave._compat.eager import are_kept, map_nested, metadata_guard, no_torch_function
from gradweave._runtime.deferred.arguments import METADATA
from gradweave._runtime.optimizer_steps.partial import FrozenStep


class _ObservedGradient(torch.Tensor):
    """A gradient that notes when it is used; operations go through to the real one."""

    _real: torch.Tensor
    _observer: LoopObserver

    @staticmethod
    def __new__(cls, real: torch.Tensor, observer: LoopObserver) -> _ObservedGradient:
        observed: _ObservedGradient = metadata_guard(cls, real)
        observed._real = real
        observed._observer = observer
        return observed

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in METADATA:
            with no_torch_function():
                return func(*args, **(kwargs or {}))
        return cls._on_real(func, getattr(func, "__name__", str(func)), args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = str(func).removeprefix("aten.")
        return cls._on_real(func, name, args, kwargs)

    @classmethod
    def _on_real(cls, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        used: list[_ObservedGradient] = []

        def real(value: Any) -> Any:
            if isinstance(value, _ObservedGradient):
                used.append(value)
                return value._real
            return value

        args, kwargs = map_nested(real, (args, kwargs or {}))
        used[0]._observer.note("accumulates" if name.startswith(("add_.", "add.")) else f"uses .grad ({name})")
        return func(*args, **(kwargs or {}))


class LoopObserver:
    """Watches one step in stock order.

    Attributes:
        needs: What the loop does between backward and step that needs all gradients at once.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.needs: list[str] = []
        self._real: dict[nn.Parameter, int] = {}
        self._settings: list[dict[str, Any]] = []
        self._hooks: list[Any] = []
        try:
            for p in (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad):
                self._hooks.append(p.register_post_accumulate_grad_hook(self._observe))
        except BaseException:
            self.detach()
            raise

    def detach(self) -> None:
        """Stops watching."""
        self._restore()
        for hook in self._hooks:
            hook.remove()

    def note(self, need: str) -> None:
        """Remembers something that the loop does."""
        if need not in self.needs:
            self.needs.append(need)

    def _observe(self, p: torch.Tensor) -> None:
        if not isinstance(p, nn.Parameter) or p.grad is None:
            return
        if torch.is_grad_enabled():
            self.note("create_graph")
            return
        if p.grad.layout is not torch.strided:
            self.note("sparse gradients")
            return
        if p.grad.dtype is not p.dtype:  # of a graph from before the model was converted
            self.note("has gradients of another type than weights")
            return
        if isinstance(p.grad, _ObservedGradient):
            return
        if are_kept([p.grad]):
            self.note("keeps gradients")
            return
        if not self._real:
            self._settings = FrozenStep(self.optimizer).groups
        self._real[p] = p._version
        p.grad = _ObservedGradient(p.grad, self)

    def _restore(self) -> None:
        replaced = [p for p in self._real if not isinstance(p.grad, _ObservedGradient)]
        if replaced and len(replaced) < len(self._real):
            self.note("assigns .grad")
        for p, version in self._real.items():
            if p._version != version:
                self.note("changes weights before step()")
            if isinstance(p.grad, _ObservedGradient):
                real = p.grad._real
                p.grad = None  # the model may have been converted meanwhile, and what stood for the gradient not
                p.grad = real.to(p.dtype)
        self._real = {}

    def before_step(self, is_last: bool) -> None:  # noqa: ARG002
        """Gives the optimizer the real gradients."""
        if self._real and _changed(self._settings, FrozenStep(self.optimizer).groups):
            self.note("changes hyperparameters before step()")
        self._restore()
        if getattr(self.optimizer, "grad_scale", None) is not None:
            self.note("GradScaler")

    def after_step(self) -> None:
        """Nothing to do: the step ran in stock order."""


def _changed(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> bool:
    """Whether any group's settings differ."""
    for then, current in zip(before, now, strict=False):
        for key, value in then.items():
            same = torch.equal(value, current[key]) if isinstance(value, torch.Tensor) else value == current.get(key)
            if not same:
                return True
    return len(before) != len(now)
