"""The state and hyperparameters of an optimizer as inputs of a graph, and its update as tensor code on them."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from numbers import Real
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.optim import Optimizer

from gradweave._compat.optimizers import own_step, without_step_hooks
from gradweave._compat.tracing import is_settled, is_symbolic
from gradweave.compiler.optimizer_reads import OptimizerReads, own_attributes
from gradweave.compiler.optimizer_slots import CountSlot, NumberSlot, StateSlot
from gradweave.compiler.python_counts import PythonCountsError
from gradweave.compiler.snapshot import IncomparableError, snapshot
from gradweave.step_graph.errors import NoStateError, NotOneGraphError

PLAIN_FORM = {"foreach": False, "fused": False}
"""The form of an update that is traced, one tensor at a time: fusing them is the compiler's work."""
_CONSTANTS = frozenset({"ns_coefficients"})
"""Hyperparameters that are part of a graph: Muon's are factors of matrix products, which take Python numbers only."""


class OptimizerInputs:
    """The state tensors and hyperparameters of some of an optimizer's parameters.

    Hyperparameters that are floats, or tuples of them, are inputs of a graph and may change between steps; so are
    Python numbers that the optimizer's step changes itself, once :meth:`take_counts` is told of them. Everything else
    in a group (flags, counts, None), state values that are no tensors, and what the optimizer's code reads
    besides, are constants of a graph: :meth:`fits` returns whether they are those it was made for.

    Args:
        optimizer: The optimizer.
        params: The parameters that a step updates.

    Attributes:
        members: For each group, the numbers of its parameters among ``params``.
        state_slots: Places of the state tensors, in the order of :meth:`state`.
        number_slots: Places of the hyperparameters and counts, in the order of :meth:`numbers`.
        settings: Constants of groups and state: place, key and snapshot.
        reads: Constants elsewhere.
    """

    def __init__(self, optimizer: Optimizer, params: Sequence[nn.Parameter]) -> None:
        self.optimizer = optimizer
        self.params = list(params)
        index_of = {id(p): index for index, p in enumerate(params)}
        self.members = [
            [index_of[id(p)] for p in group["params"] if id(p) in index_of] for group in optimizer.param_groups
        ]
        self.state_slots: list[StateSlot] = []
        self.number_slots: list[NumberSlot | CountSlot] = []
        constants: list[Any] = []
        for index, p in enumerate(params):
            for key, value in optimizer.state.get(p, {}).items():
                if isinstance(value, torch.Tensor):
                    self.state_slots.append(StateSlot(index, key))
                else:
                    constants.append((StateSlot(index, key), key, _snapshot_or_self(value)))
        for number, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if key == "params":
                    continue
                if key in _CONSTANTS:
                    constants.append((number, key, _snapshot_or_self(value)))
                elif _is_number(value):
                    self.number_slots.append(NumberSlot(number, key))
                elif isinstance(value, (tuple, list)) and value and all(map(_is_number, value)):
                    self.number_slots += [NumberSlot(number, key, position) for position in range(len(value))]
                else:
                    constants.append((number, key, _snapshot_or_self(value)))
        self.settings = tuple(constants)
        self.reads = OptimizerReads(optimizer)
        self._forms = list(map(_form, self.values()))
        self._keys = [tuple(group) for group in optimizer.param_groups]
        self._sizes = [len(optimizer.state.get(p, ())) for p in self.params]
        # Weakly: who refers to state besides its optimizer sees it without asking.
        self._known = list(map(ref, self.state()))
        self._kinds = list(map(_kind, self.state()))

    def take_counts(self, places: Sequence[StateSlot | NumberSlot]) -> None:
        """Make Python numbers inputs that are changed by the optimizer's step; equal ones are one input.

        Args:
            places: Of the numbers, in groups or in the state.
        """
        taken = set(places)
        self.settings = tuple(
            (place, key, value)
            for place, key, value in self.settings
            if (place if isinstance(place, StateSlot) else NumberSlot(place, key)) not in taken
        )
        equal: dict[Any, list[StateSlot | NumberSlot]] = defaultdict(list)
        groups = {number: group for group, members in enumerate(self.members) for number in members}
        for place in places:
            group = groups[place.param] if isinstance(place, StateSlot) else place.group
            value = self._value_at(place)
            equal[type(place), group, place.key, type(value), value].append(place)
        kept = [slot for slot in self.number_slots if slot not in taken]
        self.number_slots = [*kept, *(CountSlot(tuple(members)) for members in equal.values())]
        self._forms = list(map(_form, self.values()))

    def forget_settings(self) -> None:
        """Let a graph fit whatever the constants are: one that does not update reads none, and counts go on."""
        self.settings = ()

    @property
    def count_places(self) -> list[StateSlot | NumberSlot]:
        """The places of all counts, in the order of what :meth:`step_on` returns."""
        return [place for slot in self.number_slots if isinstance(slot, CountSlot) for place in slot.places]

    def with_counts(self, numbers: Sequence[Any], counts: Sequence[Any]) -> list[Any]:
        """Return numbers, in the order of :meth:`numbers`, with other counts."""
        of_place = dict(zip(self.count_places, counts, strict=True))
        slots = zip(self.number_slots, numbers, strict=True)
        return [of_place[slot.places[0]] if isinstance(slot, CountSlot) else number for slot, number in slots]

    def put_counts(self, counts: Sequence[Any]) -> None:
        """Put numbers where the optimizer keeps its counts."""
        for place, count in zip(self.count_places, counts, strict=True):
            self._holder_of(place)[place.key] = count

    def _holder_of(self, place: StateSlot | NumberSlot) -> dict[str, Any]:
        if isinstance(place, StateSlot):
            holder: dict[str, Any] = self.optimizer.state[self.params[place.param]]
            return holder
        return self.optimizer.param_groups[place.group]

    def _value_at(self, place: StateSlot | NumberSlot) -> Any:
        value: Any = self._holder_of(place).get(place.key)
        return value[place.position] if isinstance(place, NumberSlot) and place.position is not None else value

    def fits(self) -> bool:
        """Return whether the optimizer still has these parameters, constants and kinds of state."""
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
        if self._keys != [tuple(group) for group in groups]:
            return False
        for place, key, value in self.settings:
            holder = state[self.params[place.param]] if isinstance(place, StateSlot) else groups[place]
            if key not in holder or not _equals_snapshot(holder[key], value):
                return False
        counts = (slot for slot in self.number_slots if isinstance(slot, CountSlot))
        if any(len({self._value_at(place) for place in slot.places}) > 1 for slot in counts):
            return False
        return self._forms == list(map(_form, self.values())) and self.reads.unchanged() and self._state_fits()

    def _state_fits(self) -> bool:
        """Return whether new state tensors are of the kind of those they replace, and take them over."""
        slots = zip(self.state_slots, self._kinds, strict=True)
        for index, (slot, kind) in enumerate(slots):
            tensor = self.optimizer.state[self.params[slot.param]].get(slot.key)
            if tensor is not self._known[index]():
                if not isinstance(tensor, torch.Tensor) or _kind(tensor) != kind:
                    return False
                self._known[index] = ref(tensor)
        return True

    def state(self) -> list[torch.Tensor]:
        """Return the current state tensors."""
        state = self.optimizer.state
        return [state[self.params[slot.param]][slot.key] for slot in self.state_slots]

    def numbers(self) -> tuple[float, ...]:
        """Return the current hyperparameters and counts as Python numbers."""
        return tuple(value if type(value) is int else float(value) for value in self.values())

    def values(self) -> list[Any]:
        """Return the current hyperparameters as the optimizer has them: tensors as tensors."""
        values = []
        for slot in self.number_slots:
            value = self._value_at(_places(slot)[0])
            # NumPy's float64 is a float, too; a Python float is equal to it, and known to tracers.
            values.append(float(value) if isinstance(value, float) else value)
        return values

    def exact_values(self) -> list[Any]:
        """Return :meth:`values` for a graph that computes with them as the eager step does.

        Raises:
            NotOneGraphError: If one has a precision of its own, such as NumPy's float32, which numbers in a graph lack.
        """
        values = self.values()
        for slot, value in zip(self.number_slots, values, strict=True):
            if not isinstance(value, (float, torch.Tensor)) and type(value) is not int:
                name, key, kind = type(self.optimizer).__name__, _places(slot)[0].key, type(value)
                raise NotOneGraphError(
                    f"optimizer={name}: its {key} is a {kind.__module__}.{kind.__name__}, with whose precision a "
                    "graph does not compute; give a float"
                )
        return values

    def step_on(
        self,
        params: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor | None],
        state: Sequence[torch.Tensor],
        numbers: Sequence[Any],
        *,
        capturable: bool,
    ) -> list[Any]:
        """Run the optimizer's own update on other tensors and numbers in the place of its own.

        New tensors that the update puts into the state are copied to the tensors given for it: a graph changes its
        inputs in place.

        Args:
            params: In the place of the parameters.
            grads: Of these.
            state: In the place of :meth:`state`.
            numbers: In the place of :meth:`values`.
            capturable: Whether the update is to run in the form that torch has for CUDA graphs.

        Returns:
            The new counts, in the order of :attr:`count_places`.

        Raises:
            PythonCountsError: If the update changes Python numbers that are not among the counts.
            NotOneGraphError: If the update cannot be traced, because it keeps something outside of its state.
            NoStateError: If the optimizer has not yet created the state of a parameter.
        """
        if self.reads.incomparable is not None:
            raise self._untraceable(self.reads.incomparable)
        self._check_state()
        stand_in = self._stand_in()
        attributes = own_attributes(self.optimizer)
        stand_in.param_groups = self._groups_with(params, numbers, capturable)
        stand_in.state = defaultdict(dict)
        given = dict(zip(self.state_slots, state, strict=True))
        for index, (p, grad) in enumerate(zip(params, grads, strict=True)):
            p.grad = grad
            own = self.optimizer.state.get(self.params[index], {})
            stand_in.state[p] = {key: given.get(StateSlot(index, key), value) for key, value in own.items()}
        counts = self.count_places
        for slot, number in zip(self.number_slots, numbers, strict=True):
            for place in slot.places if isinstance(slot, CountSlot) else ():
                if isinstance(place, StateSlot):
                    stand_in.state[params[place.param]][place.key] = number
                else:
                    stand_in.param_groups[place.group][place.key] = number
        before = [dict(group) for group in stand_in.param_groups]
        # The optimizer's code runs for real, on fake tensors: what it does elsewhere in the process must be undone.
        copies = self.reads.copies()
        try:
            with torch.no_grad(), without_step_hooks(stand_in):
                own_step(self.optimizer)(stand_in)
        finally:
            changed = self.reads.changed()
            if changed is not None:
                self.reads.restore(copies)
        if changed is not None:
            raise self._untraceable(f"it keeps something in its {changed}, outside of its state")
        uncounted: list[StateSlot | NumberSlot] = []
        for index, (then, now) in enumerate(zip(before, stand_in.param_groups, strict=True)):
            own = self.optimizer.param_groups[index]
            for key, value in then.items():
                place = NumberSlot(index, key)
                if now[key] is not value and place not in counts and _is_count(own.get(key), now[key]):
                    uncounted.append(place)
                elif (now[key] is not value and place not in counts) or not _is_kept(value, own.get(key)):
                    raise self._untraceable(f"it keeps something in param_groups, under {key!r}")
        known = {id(self.optimizer): "the optimizer", id(stand_in): "the optimizer"}
        now_there = own_attributes(stand_in)
        for name in {**attributes, **now_there}:
            if not _is_unchanged(attributes.get(name), now_there.get(name), known):
                raise self._untraceable(f"it keeps something in its attribute {name!r}, outside of its state")
        for index, p in enumerate(params):
            p.grad = None
            uncounted += self._write_back(index, stand_in.state.get(p, {}), given)
        if uncounted:
            raise PythonCountsError(uncounted, str(self._untraceable("it keeps a count or another number in Python")))
        return self._new_counts(stand_in, params, numbers)

    def _new_counts(self, stand_in: Optimizer, params: Sequence[torch.Tensor], numbers: Sequence[Any]) -> list[Any]:
        """Return the counts of an optimizer that has stepped.

        Raises:
            NotOneGraphError: If the step was right for one value of a count, so that each would need a graph.
        """
        new = []
        for slot, number in zip(self.number_slots, numbers, strict=True):
            for place in slot.places if isinstance(slot, CountSlot) else ():
                if isinstance(place, StateSlot):
                    value = stand_in.state[params[place.param]].get(place.key)
                else:
                    value = stand_in.param_groups[place.group].get(place.key)
                if is_settled(number) or not _is_count(self._value_at(place), value):
                    raise self._untraceable(f"it needs the value of {place.key!r}, which it keeps in Python")
                new.append(value)
        return new

    def _stand_in(self) -> Optimizer:
        """Return an optimizer with copies of the attributes, so that its step changes nothing real."""
        stand_in = object.__new__(type(self.optimizer))
        memo: dict[int, Any] = {id(self.optimizer): stand_in}
        for name, value in own_attributes(self.optimizer).items():
            setattr(stand_in, name, _own_copy(value, memo))
        # The rest is torch's. A "step" in there is an instance attribute, as schedulers wrap the method: it would step
        # the real optimizer.
        for name, value in vars(self.optimizer).items():
            if name not in vars(stand_in) and name != "step":
                setattr(stand_in, name, value)
        stand_in._warned_capturable_if_run_uncaptured = True
        return stand_in

    def _check_state(self) -> None:
        for key, entry in self.optimizer.state.items():
            if not isinstance(key, torch.Tensor):
                raise self._untraceable("it keeps state that belongs to no parameter")
            for name, value in entry.items():
                if _holds_tensors(value):
                    raise self._untraceable(f"it keeps tensors inside of state[{name!r}]")

    def _groups_with(
        self, params: Sequence[torch.Tensor], numbers: Sequence[Any], capturable: bool
    ) -> list[dict[str, Any]]:
        groups = []
        for members, group in zip(self.members, self.optimizer.param_groups, strict=True):
            form = {key: value for key, value in PLAIN_FORM.items() if key in group}
            if "capturable" in group:
                form["capturable"] = capturable
            values = {key: _own_copy(value, {}) if _is_nested(value) else value for key, value in group.items()}
            groups.append({**values, **form, "params": [params[index] for index in members]})
        for slot, number in zip(self.number_slots, numbers, strict=True):
            if isinstance(slot, CountSlot):
                continue
            group = groups[slot.group]
            if slot.position is None:
                group[slot.key] = number
            else:
                parts = group[slot.key]
                group[slot.key] = type(parts)((*parts[: slot.position], number, *parts[slot.position + 1 :]))
        return groups

    def _write_back(
        self, index: int, now: dict[str, Any], given: dict[StateSlot, torch.Tensor]
    ) -> list[StateSlot | NumberSlot]:
        """Copy new tensors to those given for the state; return the places of changed numbers that are no counts."""
        own = self.optimizer.state.get(self.params[index], {})
        counts, uncounted = self.count_places, list[StateSlot | NumberSlot]()
        for key, value in now.items():
            original = given.get(StateSlot(index, key))
            if original is None:
                if own.get(key) is None and value is not None:
                    raise NoStateError(f"{type(self.optimizer).__name__} has no state for a parameter yet")
                place = StateSlot(index, key)
                if place in counts or _equal(value, own.get(key)):
                    continue
                if _is_count(own.get(key), value):
                    uncounted.append(place)
                else:
                    raise self._untraceable(f"it keeps state[{key!r}] as {type(value).__name__}, not as a tensor")
            elif value is not original:
                original.copy_(value)
        return uncounted

    def _untraceable(self, reason: str) -> NotOneGraphError:
        name = type(self.optimizer).__name__
        return NotOneGraphError(
            f"optimizer={name}: its step cannot be traced: {reason}; use an optimizer whose step is tensor code, "
            "such as those of torch.optim"
        )


def _snapshot_or_self(value: Any) -> Any:
    """Return a snapshot of a constant; the value itself, to be compared by identity, if there can be none."""
    try:
        return snapshot(value)
    except IncomparableError:
        return value


def _equals_snapshot(value: Any, before: Any) -> bool:
    return value is before or bool(_snapshot_or_self(value) == before)


def _own_copy(value: Any, memo: dict[int, Any]) -> Any:
    if type(value).__module__.partition(".")[0] == "gradweave":
        return value
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # any: copying runs code of the value's class
        return copy.copy(value) if isinstance(value, (dict, list, set)) else value


def _is_nested(value: Any) -> bool:
    return isinstance(value, (dict, list, set)) and not _holds_tensors(value)


def _is_kept(value: Any, own: Any) -> bool:
    """Return whether a nested value of a copied group is still equal to that of the group."""
    if not _is_nested(value) or (isinstance(value, list) and any(map(is_symbolic, value))):
        return True
    return _is_unchanged(own, value, {})


def _is_unchanged(before: Any, now: Any, known: dict[int, Any]) -> bool:
    try:
        return before is now or bool(snapshot(before, known) == snapshot(now, known))
    except IncomparableError:
        return False


def _places(slot: NumberSlot | CountSlot) -> tuple[StateSlot | NumberSlot, ...]:
    return slot.places if isinstance(slot, CountSlot) else (slot,)


def _is_count(before: Any, now: Any) -> bool:
    """Return whether a value is a Python number and stays one of its kind, which tracing may have made a symbol."""
    kinds = {int: (int, torch.SymInt), float: (float, torch.SymFloat)}
    return type(now) in kinds.get(type(before), ())


def _is_number(value: Any) -> bool:
    """Return whether a hyperparameter is a number that may change between steps, and no flag or count."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, Real) and not isinstance(value, (bool, int))


def _form(value: Any) -> Any:
    """Return the constant properties of a hyperparameter that may change: its type, or a tensor's kind."""
    return _kind(value) if isinstance(value, torch.Tensor) else float if isinstance(value, float) else type(value)


def _holds_tensors(value: Any) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple, set)) else ()
    return any(isinstance(part, torch.Tensor) for part in parts)


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _equal(one: Any, other: Any) -> bool:
    """Return whether two values are equal; tensors only if they are identical."""
    if one is other:
        return True
    if type(one) is not type(other) or isinstance(one, torch.Tensor):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)
