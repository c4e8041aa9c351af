"""What an optimizer's update reads and writes besides gradients, as inputs of a graph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gradweave.compat import own_step, without_step_hooks
from gradweave.errors import GradweaveError

PLAIN_FORM = {"foreach": False, "fused": False}
"""The form that is traced: one tensor at a time; fusing them is the compiler's work."""


@dataclass(frozen=True)
class StateSlot:
    """A tensor of the optimizer's state: of which parameter, under which key."""

    param: int
    key: str


@dataclass(frozen=True)
class NumberSlot:
    """A number that may change from step to step: of which group, under which key, where in a tuple."""

    group: int
    key: str
    position: int | None = None


class OptimizerInputs:
    """The state tensors and hyperparameters that belong to some of an optimizer's parameters.

    Hyperparameters that are floats, or tuples of them, may change between steps; everything else
    in a group (flags, counts, None) and every state value that is no tensor is part of
    :attr:`settings`, for which a graph is made.
    """

    def __init__(self, optimizer: Optimizer, params: Sequence[nn.Parameter]) -> None:
        self.optimizer = optimizer
        self.params = list(params)
        index_of = {id(p): index for index, p in enumerate(params)}
        self.members = [
            [index_of[id(p)] for p in group["params"] if id(p) in index_of] for group in optimizer.param_groups
        ]
        self.state_slots: list[StateSlot] = []
        self.number_slots: list[NumberSlot] = []
        constants: list[Any] = []
        for index, p in enumerate(params):
            for key, value in optimizer.state.get(p, {}).items():
                if isinstance(value, torch.Tensor):
                    self.state_slots.append(StateSlot(index, key))
                else:
                    constants.append((StateSlot(index, key), key, value))
        for number, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if key == "params":
                    continue
                if type(value) is float:
                    self.number_slots.append(NumberSlot(number, key))
                elif isinstance(value, tuple) and value and all(type(part) is float for part in value):
                    self.number_slots += [NumberSlot(number, key, position) for position in range(len(value))]
                elif isinstance(value, torch.Tensor):
                    self.number_slots.append(NumberSlot(number, key))
                else:
                    constants.append((number, key, value))
        self.settings = tuple(constants)
        self._sizes = [len(optimizer.state.get(p, ())) for p in self.params]

    def fits(self) -> bool:
        """Whether the optimizer still has these parameters, settings and kinds of state."""
        state = self.optimizer.state
        groups = self.optimizer.param_groups
        if len(groups) != len(self.members):
            return False
        for p, size in zip(self.params, self._sizes, strict=True):
            if len(state.get(p, ())) != size:
                return False
        own = {id(p) for p in self.params}
        for members, group in zip(self.members, groups, strict=True):
            if [id(p) for p in group["params"] if id(p) in own] != [id(self.params[index]) for index in members]:
                return False
        for place, key, value in self.settings:
            holder = state[self.params[place.param]] if isinstance(place, StateSlot) else groups[place]
            if key not in holder or holder[key] != value:
                return False
        return True

    def state(self) -> list[torch.Tensor]:
        """The state tensors as they are now."""
        state = self.optimizer.state
        return [state[self.params[slot.param]][slot.key] for slot in self.state_slots]

    def numbers(self) -> tuple[float, ...]:
        """The hyperparameters as they are now."""
        values = []
        for slot in self.number_slots:
            value = self.optimizer.param_groups[slot.group][slot.key]
            values.append(float(value if slot.position is None else value[slot.position]))
        return tuple(values)

    def step_on(
        self,
        params: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor | None],
        state: Sequence[torch.Tensor],
        numbers: Sequence[Any],
        *,
        capturable: bool,
    ) -> None:
        """Runs the optimizer's own update on other tensors and numbers in the place of its own.

        New values that the update puts into the state, in the place of those it was given, are
        written to the tensors it was given.
        """
        stand_in = object.__new__(type(self.optimizer))
        stand_in.__dict__.update(self.optimizer.__dict__)
        stand_in.param_groups = self._groups_with(params, numbers, capturable)
        stand_in.state = defaultdict(dict)
        given = dict(zip(self.state_slots, state, strict=True))
        for index, (p, grad) in enumerate(zip(params, grads, strict=True)):
            p.grad = grad
            own = self.optimizer.state.get(self.params[index], {})
            stand_in.state[p] = {key: given.get(StateSlot(index, key), value) for key, value in own.items()}
        before = [dict(group) for group in stand_in.param_groups]
        with torch.no_grad(), without_step_hooks(stand_in):
            own_step(self.optimizer)(stand_in)
        for then, now in zip(before, stand_in.param_groups, strict=True):
            if any(now[key] is not value for key, value in then.items()):
                raise self._untraceable("it keeps a count or another number in param_groups")
        for index, p in enumerate(params):
            p.grad = None
            self._write_back(index, stand_in.state.get(p, {}), given)

    def _groups_with(
        self, params: Sequence[torch.Tensor], numbers: Sequence[Any], capturable: bool
    ) -> list[dict[str, Any]]:
        groups = []
        for members, group in zip(self.members, self.optimizer.param_groups, strict=True):
            form = {key: value for key, value in PLAIN_FORM.items() if key in group}
            if "capturable" in group:
                form["capturable"] = capturable
            groups.append({**group, **form, "params": [params[index] for index in members]})
        for slot, number in zip(self.number_slots, numbers, strict=True):
            group = groups[slot.group]
            if slot.position is None:
                group[slot.key] = number
            else:
                parts = group[slot.key]
                group[slot.key] = (*parts[: slot.position], number, *parts[slot.position + 1 :])
        return groups

    def _write_back(self, index: int, now: dict[str, Any], given: dict[StateSlot, torch.Tensor]) -> None:
        own = self.optimizer.state.get(self.params[index], {})
        for key, value in now.items():
            original = given.get(StateSlot(index, key))
            if original is None:
                if key not in own and value is not None:
                    raise NoStateError(f"{type(self.optimizer).__name__} has no state for a parameter yet")
                if value is not own.get(key) and value != own.get(key):
                    raise self._untraceable(f"it keeps state[{key!r}] as {type(value).__name__}, not as a tensor")
            elif value is not original:
                original.copy_(value)

    def _untraceable(self, why: str) -> GradweaveError:
        name = type(self.optimizer).__name__
        return GradweaveError(
            f"optimizer={name}: its step cannot be traced: {why}; use an optimizer whose step is tensor code, "
            "such as those of torch.optim, or fuse() with the loop of your own"
        )


class NoStateError(GradweaveError):
    """The optimizer must take a stock step first, which creates its state."""
