"""A stand-in for a gradient that is gone, or that nobody may touch now: every use of it raises."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from gradweave._compat.eager import asked_for_fake_tensor, disabled_torch_function, metadata_guard
from gradweave.errors import GradweaveError

_CLEARING = {torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default}


class GradientGuard(torch.Tensor):
    """Looks like a gradient and has no data.

    Reading it, writing to it, or accumulating onto it, also from C++, calls ``on_use`` with the
    name of the operation and raises what that returns. Zeroing it calls ``on_clear``, for
    ``zero_grad(set_to_none=False)``; setting ``.grad`` to None removes it anyway.
    """

    _on_use: Callable[[str], GradweaveError]
    _on_clear: Callable[[], None]

    @staticmethod
    def __new__(
        cls, like: torch.Tensor, on_use: Callable[[str], GradweaveError], on_clear: Callable[[], None]
    ) -> GradientGuard:
        """A guard of the shape, type and device of ``like``; ``on_use`` gives the error to raise."""
        guard: GradientGuard = metadata_guard(cls, like)
        guard._on_use = on_use
        guard._on_clear = on_clear
        return guard

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        guards = list(_guards((args, kwargs or {})))
        if func in _CLEARING:
            for guard in guards:
                guard._on_clear()
            return args[0] if func is torch.ops.aten.zero_.default else None
        raise guards[0]._on_use(str(func).removeprefix("aten."))

    def numpy(self, **_: Any) -> Any:
        """Raises, as every use does; torch's own refusal would not say why."""
        raise self._on_use("numpy()")

    def tolist(self) -> Any:
        """Raises, likewise."""
        raise self._on_use("tolist()")

    def share_memory_(self) -> Any:
        """Raises: there is no memory to share, and torch would not notice."""
        raise self._on_use("share_memory_()")

    def data_ptr(self) -> Any:
        """Raises, likewise."""
        raise self._on_use("data_ptr()")

    def storage(self) -> Any:
        """Raises, likewise."""
        raise self._on_use("storage()")

    def untyped_storage(self) -> Any:
        """Raises, likewise, unless it is for a tensor without data that stands for this one while code is compiled."""
        if asked_for_fake_tensor():
            return super().untyped_storage()
        raise self._on_use("untyped_storage()")

    def is_shared(self) -> Any:
        """Raises, likewise."""
        raise self._on_use("is_shared()")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"GradientGuard(shape={tuple(self.shape)})"

    def __reduce_ex__(self, _: Any) -> Any:
        raise self._on_use("pickle")


def guard_gradient(param: torch.nn.Parameter, on_use: Callable[[str], GradweaveError]) -> GradientGuard:
    """A guard for one parameter's ``.grad``; zeroing it leaves zeros, as it would of the gradient."""

    def clear() -> None:
        param.grad = torch.zeros_like(param)

    return GradientGuard(param, on_use, clear)


def _guards(value: Any) -> Iterator[GradientGuard]:
    """The guards among nested arguments."""
    if isinstance(value, GradientGuard):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _guards(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _guards(item)
