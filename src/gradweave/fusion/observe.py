"""Finding out what a training loop needs of its gradients, without getting in its way."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from gradweave.compat import disabled_torch_function, metadata_guard


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

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        used: list[_ObservedGradient] = []

        def real(value: Any) -> Any:
            if isinstance(value, _ObservedGradient):
                used.append(value)
                return value._real
            return value

        args, kwargs = tree_map(real, (args, kwargs or {}))
        name = str(func).removeprefix("aten.")
        used[0]._observer.note("accumulates" if name.startswith(("add_.", "add.")) else f"uses .grad ({name})")
        return func(*args, **kwargs)


class LoopObserver:
    """Watches one step in stock order.

    Attributes:
        needs: What the loop does between backward and step that needs all gradients at once.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.needs: list[str] = []
        self._real: dict[nn.Parameter, torch.Tensor] = {}
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._observe)
            for group in optimizer.param_groups
            for p in group["params"]
            if p.requires_grad
        ]

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
        if isinstance(p.grad, _ObservedGradient):
            return
        self._real[p] = p.grad
        p.grad = _ObservedGradient(p.grad, self)

    def _restore(self) -> None:
        for p, grad in self._real.items():
            if isinstance(p.grad, _ObservedGradient):
                p.grad = grad
        self._real = {}

    def before_step(self) -> None:
        """Gives the optimizer the real gradients."""
        self._restore()
        if getattr(self.optimizer, "grad_scale", None) is not None:
            self.note("GradScaler")

    def after_step(self) -> None:
        """Nothing to do: the step ran in stock order."""
