"""A step in stock order that shows how a training loop uses its gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gradweave._compat.functions import map_nested, no_torch_function
from gradweave._compat.tensors import are_kept, metadata_guard, version_of
from gradweave._runtime.deferred.arguments import METADATA
from gradweave._runtime.optimizer_steps.snapshot import StepSnapshot


class _ObservedGradient(torch.Tensor):
    """A stand-in for a gradient that tells the observer of each use; operations are forwarded to the real one."""

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
    """Observes one step in stock order, without changing its result.

    Attributes:
        needs: Uses that the loop makes of gradients or weights between backward and step, which rule backward out.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.needs: list[str] = []
        self._versions: dict[nn.Parameter, int] = {}
        self._settings: list[dict[str, Any]] = []
        self._hooks: list[Any] = []
        try:
            for p in (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad):
                self._hooks.append(p.register_post_accumulate_grad_hook(self._observe))
        except BaseException:
            self.detach()
            raise

    def detach(self) -> None:
        """Put the real gradients back and remove all hooks."""
        self._restore()
        for hook in self._hooks:
            hook.remove()

    def note(self, need: str) -> None:
        """Record something that the loop does."""
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
        if p.grad.dtype is not p.dtype:  # the model was converted after the forward
            self.note("has gradients of another type than its weights")
            return
        if isinstance(p.grad, _ObservedGradient):
            return
        if are_kept([p.grad]):
            self.note("keeps gradients")
            return
        if not self._versions:
            self._settings = StepSnapshot(self.optimizer).groups
        self._versions[p] = version_of(p)
        p.grad = _ObservedGradient(p.grad, self)

    def _restore(self) -> None:
        replaced = [p for p in self._versions if not isinstance(p.grad, _ObservedGradient)]
        if replaced and len(replaced) < len(self._versions):
            self.note("assigns .grad")
        for p, version in self._versions.items():
            if version_of(p) != version:
                self.note("changes weights before step()")
            if isinstance(p.grad, _ObservedGradient):
                real = p.grad._real
                # The stand-in has the old type if the model was converted meanwhile.
                p.grad = None
                p.grad = real.to(p.dtype)
        self._versions = {}

    def before_step(self, is_last: bool) -> None:  # noqa: ARG002
        """Give the optimizer the real gradients."""
        if self._versions and _changed(self._settings, StepSnapshot(self.optimizer).groups):
            self.note("changes hyperparameters before step()")
        self._restore()
        if getattr(self.optimizer, "grad_scale", None) is not None:
            self.note("GradScaler")

    def after_step(self) -> None:
        """Do nothing: the step ran in stock order."""


def _changed(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> bool:
    """Return whether any group's settings differ."""
    for then, current in zip(before, now, strict=False):
        for key, value in then.items():
            same = torch.equal(value, current[key]) if isinstance(value, torch.Tensor) else value == current.get(key)
            if not same:
                return True
    return len(before) != len(now)
