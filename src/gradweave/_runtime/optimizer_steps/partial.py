"""An optimizer's own update, run on some of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.optim import Optimizer

from gradweave._compat.optimizers import own_step, without_step_hooks
from gradweave._runtime.buckets import Bucket
from gradweave._runtime.optimizer_steps.snapshot import PreparedStep, StepSnapshot


class PartialStepper:
    """Steps subsets of an optimizer's parameters through the optimizer's own code.

    The code runs on a stand-in: an object of the same class with the same attributes, whose groups hold the subset with
    the same hyperparameters. The optimizer itself is not touched, since other threads may look at it meanwhile. The
    state is the optimizer's own; step hooks do not run.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.recorder: Callable[[int], AbstractContextManager[None]] | None = None
        self._step = own_step(optimizer)

    def step_bucket(
        self, bucket: Bucket, step: StepSnapshot | PreparedStep | None = None, state: Mapping[Any, Any] | None = None
    ) -> None:
        """Update a bucket, inside the recorder's context if there is one.

        Args:
            bucket: The parameters.
            step: What was captured for them at ``step()``; None: the optimizer's settings as they are now.
            state: The state, where ``optimizer.state`` is a stand-in.
        """
        with nullcontext() if self.recorder is None else self.recorder(bucket.number):
            if isinstance(step, PreparedStep):
                step.commit(bucket.params)
            else:
                self.step(bucket.groups, step, state)

    def step_nothing(self) -> None:
        """Take a step with no parameter at all."""
        self.step(dict.fromkeys(range(len(self.optimizer.param_groups)), ()))

    def step(
        self,
        subset: Mapping[int, Sequence[torch.nn.Parameter]],
        snapshot: StepSnapshot | None = None,
        state: Mapping[Any, Any] | None = None,
    ) -> None:
        """Update the given parameters of each group, by the group's index."""
        settings = self.optimizer.param_groups if snapshot is None else snapshot.groups
        # Not a copy: __init__ may do anything, and the stand-in is to share the optimizer's attributes and state.
        stand_in = object.__new__(type(self.optimizer))
        vars(stand_in).update(vars(self.optimizer))
        if snapshot is not None:
            vars(stand_in).update(snapshot.attributes)
        if state is not None:
            vars(stand_in)["state"] = state
        vars(stand_in)["param_groups"] = [{**settings[index], "params": params} for index, params in subset.items()]
        with without_step_hooks(stand_in):
            self._step(stand_in)


def no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which an update's arithmetic is not cast."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def with_default_type(wanted: torch.dtype) -> AbstractContextManager[None]:
    """Return a context with a given default dtype, such as the one at ``step()``."""
    now = torch.get_default_dtype()
    return nullcontext() if now is wanted else _with_other_default_type(wanted, now)


@contextmanager
def _with_other_default_type(wanted: torch.dtype, now: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(wanted)
    try:
        yield
    finally:
        torch.set_default_dtype(now)
