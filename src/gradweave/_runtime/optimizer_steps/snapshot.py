"""Snapshots of all that a step reads besides gradients and state, for updates that run later."""

from __future__ import annotations

import copy
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch.optim import Optimizer

from gradweave._compat.functions import flat_leaves
from gradweave._runtime.two_phase_step import Commit, two_phase_step

_SCALER_ATTRIBUTES = ("grad_scale", "found_inf")

_TORCH_ATTRIBUTES = frozenset(
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
"""Attributes of every optimizer besides its hooks: those of torch, its schedulers and its scalers."""

_FOREIGN_PREFIXES = ("_optimizer_", "_gradweave")
"""Prefixes of attributes that are none of the optimizer's own: torch's hooks, and claims."""

_SCALARS = frozenset({bool, int, float, complex, str, type(None)})
"""Types of most settings, tested first: every step looks at all settings."""


class StepSnapshot:
    """What a step would read if it ran now: hyperparameters, the optimizer's own attributes, a scaler's verdict.

    All of it may change before a deferred update runs: schedulers change hyperparameters, some of them in place, a loop
    may change attributes, and GradScaler changes and deletes its verdict.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.groups = [
            {key: _copied(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
        ]
        self.attributes = {**class_data(optimizer), **instance_data(optimizer)}
        for name in _SCALER_ATTRIBUTES:
            if (value := getattr(optimizer, name, None)) is not None:
                self.attributes[name] = _copied(value)

    @property
    def may_change(self) -> bool:
        """Whether the originals could change in place, or be replaced, before an update that is launched now runs."""
        values = [value for group in self.groups for value in group.values() if type(value) not in _SCALARS]
        return bool(self.attributes) or any(isinstance(leaf, torch.Tensor) for leaf in flat_leaves(values))


class PreparedStep:
    """A two-phase step whose first phase is done; its commit updates parameters later, in parts."""

    may_change = True

    def __init__(self, commit: Commit) -> None:
        self.commit = commit


def capture_step(optimizer: Optimizer) -> StepSnapshot | PreparedStep:
    """Return what an update needs to do later what a step would do now."""
    two_phase = two_phase_step(optimizer)
    return StepSnapshot(optimizer) if two_phase is None else PreparedStep(two_phase.prepare_step())


def can_be_captured(optimizer: Optimizer) -> bool:
    """Return whether all that a step reads in groups and attributes can be kept as it is for later updates."""
    groups = [value for group in optimizer.param_groups for key, value in group.items() if key != "params"]
    return all(is_data(value) or is_immutable(value) for value in (*groups, *own_attributes(optimizer).values()))


def own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Return the attributes that a class, or the loop, has added to those of torch's optimizers."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in _TORCH_ATTRIBUTES and not name.startswith(_FOREIGN_PREFIXES)
    }


def instance_data(optimizer: Optimizer) -> dict[str, Any]:
    """Return copies of those own attributes that hold plain data or tensors."""
    return {name: _copied(value) for name, value in own_attributes(optimizer).items() if is_data(value)}


def class_data(optimizer: Optimizer) -> dict[str, Any]:
    """Return copies of the plain data and tensors that an optimizer's own classes hold as attributes.

    A deferred step runs on a stand-in whose instance attributes they become, so that ``self.name`` reads the copy.
    """
    owners = [owner for owner in reversed(type(optimizer).__mro__) if not _is_of_torch(owner)]
    return {
        name: _copied(value)
        for owner in owners
        for name, value in vars(owner).items()
        if is_data(value) and not name.startswith(("__", *_FOREIGN_PREFIXES)) and name not in _TORCH_ATTRIBUTES
    }


def copy_attributes(optimizer: Optimizer, trial: Optimizer, memo: dict[int, Any]) -> None:
    """Copy an optimizer's own attributes to a copy of it, on which steps are tried.

    ``copy.deepcopy`` of an optimizer copies only what ``__getstate__`` returns: defaults, state and groups.
    """
    own = own_attributes(optimizer)
    for name, value in vars(optimizer).items():
        if name not in vars(trial) and name != "step":
            setattr(trial, name, copy.deepcopy(value, memo) if name in own else value)


def is_data(value: Any) -> bool:
    """Return whether a value is plain data or tensors, which can be copied as they are."""
    if type(value) in _SCALARS:
        return True
    if isinstance(value, (list, tuple)):
        return all(map(is_data, value))
    if isinstance(value, dict):
        return all(map(is_data, value.values()))
    return isinstance(value, (bool, int, float, complex, str, torch.Tensor))


def is_immutable(value: Any) -> bool:
    """Return whether an object that is no data cannot change: a type, or a function without a closure."""
    if isinstance(value, FunctionType):
        return value.__closure__ is None
    return isinstance(value, (type, BuiltinFunctionType, torch.dtype, torch.device, torch.layout, torch.memory_format))


def _is_of_torch(owner: type) -> bool:
    return owner is object or owner.__module__.startswith("torch.")


def _copied(value: Any) -> Any:
    if type(value) in _SCALARS:
        return value
    if isinstance(value, torch.Tensor):
        return value.clone()
    # Whether any other object changes cannot be seen: steps that read one are not deferred (can_be_captured).
    return copy.deepcopy(value) if isinstance(value, (list, tuple, dict)) and is_data(value) else value
