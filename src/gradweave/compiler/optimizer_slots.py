"""Places of the values in an optimizer that are inputs of a graph."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StateSlot:
    """The place of a value in the optimizer's state: number of the parameter, and key."""

    param: int
    key: str


@dataclass(frozen=True)
class NumberSlot:
    """The place of a number that may change between steps: group, key, and position if the value is a tuple."""

    group: int
    key: str
    position: int | None = None


@dataclass(frozen=True)
class CountSlot:
    """The places of equal Python numbers that the optimizer's own step changes, such as its count of steps."""

    places: tuple[StateSlot | NumberSlot, ...]
