"""The state of an optimizer while updates are pending."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any


class PendingState(defaultdict[Any, Any]):
    """A stand-in for ``optimizer.state`` that applies pending updates before it is read or written.

    A defaultdict by type, like the state of every torch optimizer, since loops and libraries check the type. It stays
    empty itself.

    Args:
        settle: Applies what is pending and returns the optimizer's own state.
    """

    def __new__(cls, settle: Callable[[], Any]) -> Any:
        # A loop makes a state like this one by type(state)(dict): the result must be a plain one.
        return defaultdict(settle) if isinstance(settle, type) else super().__new__(cls)

    def __init__(self, settle: Callable[[], Any]) -> None:
        super().__init__(dict)
        self._settle = settle

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._settle(), memo)

    def __reduce__(self) -> Any:
        return self._settle().__reduce__()


def _forward_to_settled(name: str) -> Callable[..., Any]:
    def method(self: PendingState, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._settle(), name)(*args, **kwargs)

    return method


for _name in (
    "__getitem__", "__setitem__", "__delitem__", "__iter__", "__len__", "__contains__", "__eq__", "__repr__", "get",
    "items", "keys", "values", "pop", "popitem", "clear", "setdefault", "update", "copy", "__ne__", "__reversed__",
    "__or__", "__ror__", "__ior__", "__copy__", "__missing__", "__sizeof__",
):  # fmt: skip
    setattr(PendingState, _name, _forward_to_settled(_name))
