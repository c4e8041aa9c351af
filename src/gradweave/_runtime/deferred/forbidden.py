"""Gradients that have been freed, or that must not be used now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gradweave._compat.foreach import FOREACH_ZERO
from gradweave._compat.functions import disabled_torch_function
from gradweave._compat.tensors import asked_for_fake_tensor, metadata_guard
from gradweave._runtime.deferred.arguments import of_type
from gradweave.errors import GradweaveError

_CLEARING = {torch.ops.aten.zero_.default, FOREACH_ZERO}


class ForbiddenGradient(torch.Tensor):
    """A stand-in without data, every use of which raises.

    Reading it, writing to it, or accumulating onto it, also from C++, calls ``on_use`` with the name of the operation
    and raises the error that it returns. Zeroing it, as ``zero_grad(set_to_none=False)`` does, calls ``on_clear``.
    """

    _on_use: Callable[[str], GradweaveError]
    _on_clear: Callable[[], None]

    @staticmethod
    def __new__(
        cls, like: torch.Tensor, on_use: Callable[[str], GradweaveError], on_clear: Callable[[], None]
    ) -> ForbiddenGradient:
        """Return a stand-in of the shape, type and device of ``like``."""
        forbidden: ForbiddenGradient = metadata_guard(cls, like)
        forbidden._on_use = on_use
        forbidden._on_clear = on_clear
        return forbidden

    # Autograd accumulates in C++, past __torch_function__; the dispatcher is below both, so one hook there is enough.
    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = list(of_type((args, kwargs or {}), ForbiddenGradient))
        if func in _CLEARING:
            for one in found:
                one._on_clear()
            return args[0] if func is torch.ops.aten.zero_.default else None
        raise found[0]._on_use(str(func).removeprefix("aten."))

    # The methods below access memory without an operation that the dispatcher would see.

    def numpy(self, **_: Any) -> Any:
        """Raise; torch's own refusal would not say why."""
        raise self._on_use("numpy()")

    def tolist(self) -> Any:
        """Raise; torch's own refusal would not say why."""
        raise self._on_use("tolist()")

    def share_memory_(self) -> Any:
        """Raise: there is no memory to share, and torch would not notice."""
        raise self._on_use("share_memory_()")

    def data_ptr(self) -> Any:
        """Raise: there is no memory."""
        raise self._on_use("data_ptr()")

    def storage(self) -> Any:
        """Raise: there is no memory."""
        raise self._on_use("storage()")

    def untyped_storage(self) -> Any:
        """Raise, except for Dynamo, which makes a fake tensor of this one while it compiles."""
        if asked_for_fake_tensor():
            return super().untyped_storage()
        raise self._on_use("untyped_storage()")

    def is_shared(self) -> Any:
        """Raise: there is no memory."""
        raise self._on_use("is_shared()")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"ForbiddenGradient(shape={tuple(self.shape)})"

    def __reduce_ex__(self, _: Any) -> Any:
        raise self._on_use("pickle")


def forbidden_gradient(param: nn.Parameter, on_use: Callable[[str], GradweaveError]) -> ForbiddenGradient:
    """Return a stand-in for a parameter's ``.grad``; zeroing it leaves zeros, as with the gradient itself."""

    def clear() -> None:
        param.grad = torch.zeros_like(param)

    return ForbiddenGradient(param, on_use, clear)
