"""A compiled step that is captured as one CUDA graph and replayed."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Sequence
from enum import Enum, auto
from typing import Any

import torch

from gradweave._compat.tensors import free_matmul_workspaces
from gradweave._logging import announce
from gradweave.compiler.lanes import Clock
from gradweave.compiler.lower import Compiled
from gradweave.schedule.schedule import Schedule

WARM_UP_STEPS = 2
"""Steps that run before the capture: training steps that load and allocate what a capture may not."""

MAIN_PRIORITY = -1
"""Priority of the captured stream: work on a second stream fills the gaps that this one leaves."""


class CaptureState(Enum):
    """State of a step that is to be captured.

    WARMING_UP becomes UNCAPTURED after :data:`WARM_UP_STEPS` steps. UNCAPTURED becomes CAPTURED in the next step, or
    REFUSED, for good, if torch cannot capture it. CAPTURED becomes UNCAPTURED when a tensor that the graph uses in
    place has moved; that step captures again.
    """

    WARMING_UP = auto()
    UNCAPTURED = auto()
    CAPTURED = auto()
    REFUSED = auto()


class Captured:
    """A compiled step that is captured once and then replayed with one launch.

    A CUDA graph reads and writes the addresses that it was captured with. Weights, buffers and optimizer state are used
    in place; other inputs are copied to where the graph reads them, and outputs from where it leaves them, so that what
    a step has returned stays as it is.

    Args:
        step: The step to capture.
        in_place: Positions of the inputs that are used where they are; the others are copied.
        changed: Those of them that the step writes. The others are copied, too, once they are found to move, as does a
            buffer that every forward replaces.
    """

    def __init__(self, step: Compiled, in_place: Collection[int], changed: Collection[int]) -> None:
        self._step = step
        self._in_place = set(in_place)
        self._changed = set(changed)
        self._state = CaptureState.WARMING_UP
        self._warm_ups = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._static: list[Any] = []
        self._addresses: dict[int, int] = {}
        self._state_addresses: list[int] = []
        self._outputs: list[Any] = []

    def fits(self) -> bool:
        """Return whether the compiled step fits."""
        return self._step.fits()

    def may_fit_again(self) -> bool:
        """Return whether the compiled step may fit again."""
        return self._step.may_fit_again()

    @property
    def schedule(self) -> Schedule | None:
        """The schedule that the step runs by; None if its compiler has chosen the order."""
        return self._step.schedule

    @property
    def carries(self) -> bool:
        """Whether a run has left work to the next one: never, since a graph reads where it read when captured."""
        return self._step.carries

    def run_measured(self, inputs: Sequence[Any], clock: Clock) -> list[Any]:
        """Take the step by its schedule, region by region, and not as a graph."""
        return self._step.run_measured(inputs, clock)

    def references(self) -> Counter[int]:
        """Return how often each object is referred to between runs, by its id."""
        return self._step.references()

    def flush(self) -> None:
        """Do what a run has left: nothing."""
        self._step.flush()

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """Take the step."""
        if self._state is CaptureState.WARMING_UP:
            return self._warm_up(inputs)
        if self._state is CaptureState.CAPTURED and self._has_moved(inputs):
            now = self._locate(inputs)
            self._in_place -= {i for i in now if now[i] != self._addresses[i] and i not in self._changed}
            self._state = CaptureState.UNCAPTURED
        if self._state is CaptureState.UNCAPTURED:
            self._try_to_capture(inputs)
        return self._replay(inputs) if self._state is CaptureState.CAPTURED else self._step.run(inputs)

    def _warm_up(self, inputs: Sequence[Any]) -> list[Any]:
        if self._warm_ups == 0:
            free_matmul_workspaces()  # the eager first step has left one for each of its threads
        self._warm_ups += 1
        if self._warm_ups == WARM_UP_STEPS:
            self._state = CaptureState.UNCAPTURED
        return self._step.run(inputs)

    def _replay(self, inputs: Sequence[Any]) -> list[Any]:
        self._step.upload()
        for index, (static, given) in enumerate(zip(self._static, inputs, strict=True)):
            if index not in self._in_place and isinstance(given, torch.Tensor):
                static.copy_(given, non_blocking=True)
        self._graph.replay()  # type: ignore[union-attr]
        self._step.finish()
        return [output.clone() if isinstance(output, torch.Tensor) else output for output in self._outputs]

    def _has_moved(self, inputs: Sequence[Any]) -> bool:
        """Return whether a weight, a buffer or state is no longer where the graph uses it."""
        return self._addresses != self._locate(inputs) or self._state_addresses != self._locate_state()

    def _locate(self, inputs: Sequence[Any]) -> dict[int, int]:
        return {index: inputs[index].data_ptr() for index in self._in_place}

    def _locate_state(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self._step.tensors()]

    def _try_to_capture(self, inputs: Sequence[Any]) -> None:
        """Capture the step, which runs none of its work, so that it can be taken in another way if that fails."""
        try:
            self._capture(inputs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # of operations that read a value on the host, or that no capture may contain
            self._state, self._static, self._outputs = CaptureState.REFUSED, [], []
            torch.cuda.synchronize()
            why = str(error).partition("\n")[0]
            announce(
                f"compile: the step is not replayed as one CUDA graph, which takes longer: {why}", level=logging.WARNING
            )

    def _capture(self, inputs: Sequence[Any]) -> None:
        self._graph, self._outputs = None, []  # frees the memory of an earlier graph for this one
        self._static = [
            x if index in self._in_place or not isinstance(x, torch.Tensor) else x.clone()
            for index, x in enumerate(inputs)
        ]
        self._addresses = self._locate(inputs)
        self._state_addresses = self._locate_state()
        self._step.upload()  # not part of the graph: it copies from the host's memory, which is gone at a replay
        # cuBLAS keeps a workspace for each stream that has multiplied. One that is allocated in the capture is memory
        # of the graph, which is written at each replay: it must not be kept for other work.
        free_matmul_workspaces()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(priority=MAIN_PRIORITY)):
            self._outputs = self._step.launch(self._static)
        free_matmul_workspaces()
        self._graph = graph
        self._state = CaptureState.CAPTURED
