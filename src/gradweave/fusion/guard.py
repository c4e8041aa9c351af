"""A stand-in for a gradient that is gone, or that nobody may touch now: every use of it raises."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gradweave.compat import disabled_torch_function, metadata_guard
from gradweave.errors import GradweaveError

_CLEARING = {torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default}


class GradientGuard(torch.Tensor):
    """Looks like its parameter's gradient and has no data.

    Reading it, writing to it, or accumulating onto it, also from C++, calls ``on_use`` with the
    name of the operation and raises what that returns. Zeroing it removes it, as
    ``zero_grad(set_to_none=False)`` does, and setting ``.grad`` to None does so anyway.
    """

    _param: weakref.ref[nn.Parameter]
    _on_use: Callable[[str], GradweaveError]

    @staticmethod
    def __new__(cls, param: nn.Parameter, on_use: Callable[[str], GradweaveError]) -> GradientGuard:
        """A guard for ``param.grad``; ``on_use`` gives the error to raise."""
        guard: GradientGuard = metadata_guard(cls, param)
        guard._param = weakref.ref(param)
        guard._on_use = on_use
        return guard

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        guards = list(_guards((args, kwargs or {})))
        if func in _CLEARING:
            for guard in guards:
                param = guard._param()
                if param is not None and param.grad is guard:
                    param.grad = None
            return args[0] if func is torch.ops.aten.zero_.default else None
        raise guards[0]._on_use(str(func).removeprefix("aten."))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"GradientGuard(shape={tuple(self.shape)})"

    def __reduce_ex__(self, _: Any) -> Any:
        raise self._on_use("pickle")


def _guards(value: Any) -> Any:
    """The guards among nested arguments."""
    if isinstance(value, GradientGuard):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _guards(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _guards(item)
