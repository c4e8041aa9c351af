"""Private names of torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules

Action = tuple[str, int, int]
"""The kind, F, X, W, or B for X and W together; the stage; the micro-batch."""

_ONE_STAGE: dict[str, Any] = {"gpipe": pipelining.ScheduleGPipe, "one_f_one_b": pipelining.Schedule1F1B}
_MORE_STAGES: dict[str, Any] = {
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
    "zbv": pipelining.ScheduleZBVZeroBubble,
}
_LETTERS = {
    "F": schedules._ComputationType.FORWARD,
    "X": schedules._ComputationType.BACKWARD_INPUT,
    "W": schedules._ComputationType.BACKWARD_WEIGHT,
    "B": schedules._ComputationType.FULL_BACKWARD,
}
_MEANINGS = {kind: letter for letter, kind in _LETTERS.items()}


def torch_program(name: str, ranks: int, stages_per_rank: int, microbatches: int) -> list[list[Action]]:
    """Return the actions of each rank, in order, in a schedule of torch's own with several stages per rank.

    Raises:
        ValueError: From torch, if the schedule does not allow these numbers.
    """
    order = _order_of(name, ranks, stages_per_rank, microbatches)
    return [[_told(action) for action in order[rank] if action is not None] for rank in range(ranks)]


def _order_of(name: str, ranks: int, stages_per_rank: int, microbatches: int) -> Mapping[int, Sequence[Any]]:
    """Return the order of a schedule that is made with stand-ins: it asks stages only for their places."""
    stages = [
        SimpleNamespace(
            num_stages=ranks * stages_per_rank, stage_index=index, group_size=ranks, group_rank=0, submod=None
        )
        for index in range(stages_per_rank)
    ]
    schedule = _MORE_STAGES[name](stages, microbatches, loss_fn=_no_loss)
    order: Mapping[int, Sequence[Any]] = schedule.pipeline_order
    return order


def _no_loss(*_: Any) -> torch.Tensor:
    return torch.zeros(())


def _told(action: Any) -> Action:
    return _MEANINGS[action.computation_type], action.stage_index, action.microbatch_index


class Runtime(Protocol):
    """A schedule of torch's, as pipelines use it."""

    def step(self, *args: Any, target: Any, losses: list[torch.Tensor], return_outputs: bool) -> Any:
        """Run forward and backward of a batch."""

    def release(self) -> None:
        """Drop the stages; the schedule cannot be used any more."""


class _WithTrialContext:
    """Mixed into every schedule here: puts a context around the trial run by which torch learns shapes.

    The trial run is a forward of the user's layers that the user did not ask for: hooks and random numbers must not see
    it.
    """

    trial: Callable[[], AbstractContextManager[None]]

    def release(self) -> None:
        """Drop the stages, with the group and the messages that they hold.

        A failed step's traceback keeps the schedule for as long as its user keeps the error, and connections close only
        when nothing refers to the group. Which attributes lead to it differs between torch's schedules: all go.
        """
        vars(self).clear()

    def _initialize_stages(self, *args: Any, **kwargs: Any) -> None:
        with self.trial():
            super()._initialize_stages(*args, **kwargs)  # type: ignore[misc]

    def _initialize_stage(self, *args: Any, **kwargs: Any) -> None:
        with self.trial():
            super()._initialize_stage(*args, **kwargs)  # type: ignore[misc]


def make_runtime(
    name: str,
    program: Sequence[Iterable[Action]],
    stages: list[Any],
    microbatches: int,
    loss_fn: Callable[..., torch.Tensor],
    trial: Callable[[], AbstractContextManager[None]],
) -> Runtime:
    """Return the schedule of torch that runs this rank's stages.

    Args:
        name: One of torch's own schedules; with any other name, torch's runtime follows the program.
        program: The actions of each rank.
        stages: This rank's stages.
        microbatches: Micro-batches of a step.
        loss_fn: The loss of the last stage's output and the target, for one micro-batch.
        trial: Make the context for the run on the first micro-batch by which torch learns shapes.
    """
    base = _ONE_STAGE.get(name) or _MORE_STAGES.get(name) or schedules._PipelineScheduleRuntime
    kind = type(f"WithTrialContext{base.__name__}", (_WithTrialContext, base), {"trial": staticmethod(trial)})
    given = stages[0] if name in _ONE_STAGE else stages
    # Gradients are not scaled: the owner's loss_fn has divided by the number of micro-batches.
    runtime: Any = kind(given, microbatches, loss_fn=loss_fn, scale_grads=False)
    if name not in _ONE_STAGE and name not in _MORE_STAGES:
        actions = {
            rank: [schedules._Action(stage, _LETTERS[what], microbatch) for what, stage, microbatch in order]
            for rank, order in enumerate(program)
        }
        runtime._prepare_schedule_with_comms(actions)
    made: Runtime = runtime
    return made
