"""Running an optimizer's own update on some of its parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch.optim import Optimizer

from gradweave._compat.eager import flat_leaves, own_step, without_step_hooks
from gradweave._runtime.buckets import Bucket
from gradweave._runtime.two_phase_step import Commit, two_phase_step

_SCALER_ATTRIBUTES = ("grad_scale", "found_inf")


class FrozenStep:
    """What a step would do if it ran now: hyperparameters, an optimizer's own attributes, a scaler's verdict.

    Schedulers change the first, some of them in place, a loop may change the second, and GradScaler changes and deletes
    the last, before a deferred update gets to run.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.groups = [
            {key: _own(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
        ]
        self.attributes = {**class_numbers(optimizer), **own_numbers(optimizer)}
        for name in _SCALER_ATTRIBUTES:
            if (value := getattr(optimizer, name, None)) is not None:
                self.attributes[name] = _own(value)

    @property
    def has_tensors(self) -> bool:
        """Whether something of it could be changed in place, or is looked at when an update runs."""
        values = [value for group in self.groups for value in group.values() if type(value) not in _PLAIN]
        return bool(self.attributes) or any(isinstance(part, torch.Tensor) for part in flat_leaves(values))


def attributes_of(optimizer: Optimizer) -> dict[str, Any]:
    """The attributes that a class, or the loop, has added to those of torch's optimizers."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in _OF_ALL_OPTIMIZERS and not name.startswith(_OF_OTHERS)
    }


def own_numbers(optimizer: Optimizer) -> dict[str, Any]:
    """Of these the ones that hold plain data or tensors, as they are now."""
    return {name: _own(value) for name, value in attributes_of(optimizer).items() if is_data(value)}


def class_numbers(optimizer: Optimizer) -> dict[str, Any]:
    """Return the plain data and tensors that an optimizer's class holds, as they are now, unless it is torch's own.

    A step that reads one through the optimizer finds it in the stand-in that carries the update out.
    """
    owners = [owner for owner in reversed(type(optimizer).__mro__) if not _is_of_torch(owner)]
    return {
        name: _own(value)
        for owner in owners
        for name, value in vars(owner).items()
        if is_data(value) and not name.startswith(("__", *_OF_OTHERS)) and name not in _OF_ALL_OPTIMIZERS
    }


def _is_of_torch(owner: type) -> bool:
    return owner is object or owner.__module__.startswith("torch.")


def copy_attributes(optimizer: Optimizer, trial: Optimizer, memo: dict[int, Any]) -> None:
    """Gives a copy of an optimizer, on which steps are tried, attributes of its own."""
    own = attributes_of(optimizer)
    for name, value in vars(optimizer).items():
        if name not in vars(trial) and name != "step":
            setattr(trial, name, copy.deepcopy(value, memo) if name in own else value)


_OF_ALL_OPTIMIZERS = frozenset(
    {
        "defaults",
        "state",
        "param_groups",
        "step",
        "_zero_grad_profile_name",
        "_warned_capturable_if_run_uncaptured",
        "_need_device_dtype_check_for_fused",
        "_step_supports_amp_scaling",
        "_opt_called",
        "_step_count",
        *_SCALER_ATTRIBUTES,
    }
)
"""What torch, its schedulers and its scalers keep in an optimizer besides hooks."""
_OF_OTHERS = ("_optimizer_", "_gradweave")


_PLAIN = frozenset({bool, int, float, complex, str, type(None)})
"""What most settings are: looked for first, since every step looks at all settings."""


def is_data(value: Any) -> bool:
    """Whether a value is plain data or tensors, which a copy can keep as they are."""
    if type(value) in _PLAIN:
        return True
    if isinstance(value, (list, tuple)):
        return all(map(is_data, value))
    if isinstance(value, dict):
        return all(map(is_data, value.values()))
    return value is None or isinstance(value, (bool, int, float, complex, str, torch.Tensor))


class BegunStep:
    """A step that its optimizer has begun with all gradients; the parameters are updated later, in parts.

    Args:
        finish: Updates some of them.
    """

    has_tensors = True

    def __init__(self, finish: Commit) -> None:
        self.finish = finish


def begins_whole(optimizer: Optimizer) -> bool:
    """Return whether an optimizer needs all gradients first, and can update in parts then."""
    return two_phase_step(optimizer) is not None


def step_of(optimizer: Optimizer) -> FrozenStep | BegunStep:
    """What a step would do if it ran now, for updates that come later."""
    optimizer_in_phases = two_phase_step(optimizer)
    return FrozenStep(optimizer) if optimizer_in_phases is None else BegunStep(optimizer_in_phases.prepare_step())


def cannot_change(value: Any) -> bool:
    """Whether an object that is no data is what it is: a type, or a function that remembers nothing."""
    if isinstance(value, FunctionType):
        return value.__closure__ is None
    return isinstance(value, (type, BuiltinFunctionType, torch.dtype, torch.device, torch.layout, torch.memory_format))


def can_be_frozen(optimizer: Optimizer) -> bool:
    """Whether all that a step reads in groups and attributes can be kept as it is for updates that come later."""
    groups = [value for group in optimizer.param_groups for key, value in group.items() if key != "params"]
    return all(is_data(value) or cannot_change(value) for value in (*groups, *attributes_of(optimizer).values()))


def _own(value: Any) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        return value.clone()
    # Anything else cannot be told from a copy of it: updates that use it are not put off.
    return copy.deepcopy(value) if isinstance(value, (list, tuple, dict)) and is_data(value) else value


class PartialStepper:
    """Steps subsets of an optimizer's parameters through the optimizer's own code.

    The code runs on a stand-in with the optimizer's attributes, whose groups hold the subset and the same
    hyperparameters; the optimizer itself stays as it is, for threads that look at it meanwhile. State is the
    optimizer's own; step hooks do not run.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.recorder: Callable[[int], AbstractContextManager[None]] | None = None
        self._step = own_step(optimizer)

    def step_bucket(
        self, bucket: Bucket, frozen: FrozenStep | BegunStep | None = None, state: Mapping[Any, Any] | None = None
    ) -> None:
        """Updates a bucket, and lets a recorder see when."""
        with nullcontext() if self.recorder is None else self.recorder(bucket.number):
            if isinstance(frozen, BegunStep):
                frozen.finish(bucket.params)
            else:
                self.step(bucket.groups, frozen, state)

    def step_nothing(self) -> None:
        """A step with no parameter at all."""
        self.step(dict.fromkeys(range(len(self.optimizer.param_groups)), ()))

    def step(
        self,
        subset: Mapping[int, Sequence[torch.nn.Parameter]],
        frozen: FrozenStep | None = None,
        state: Mapping[Any, Any] | None = None,
    ) -> None:
        """Updates the given parameters of each group, by index, as ``frozen`` says or as things stand."""
        settings = self.optimizer.param_groups if frozen is None else frozen.groups
        stand_in = object.__new__(type(self.optimizer))
        vars(stand_in).update(vars(self.optimizer))
        if frozen is not None:
            vars(stand_in).update(frozen.attributes)
        if state is not None:
            vars(stand_in)["state"] = state
        vars(stand_in)["param_groups"] = [{**settings[index], "params": params} for index, params in subset.items()]
        with without_step_hooks(stand_in):
            self._step(stand_in)


def no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Context in which an update's arithmetic is not cast, whatever surrounds it."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def with_default_type(wanted: torch.dtype) -> AbstractContextManager[None]:
    """Context in which new tensors are of the type that they were of at ``step()``."""
    now = torch.get_default_dtype()
    return nullcontext() if now is wanted else _with_other_default_type(wanted, now)


@contextmanager
def _with_other_default_type(wanted: torch.dtype, now: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(wanted)
    try:
        yield
    finally:
        torch.set_default_dtype(now)
