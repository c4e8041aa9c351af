"""Replaying a compiled step as one CUDA graph."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Any

import torch

from gradweave._compat.eager import free_matmul_workspaces
from gradweave._logging import announce
from gradweave.compiler.lower import Compiled

WARM_UP_STEPS = 2
"""Steps that run before the capture: they are training steps, and load what a capture may not."""

FIRST = -1
"""Priority of the stream that is captured: what a step has on a second stream fills the gaps that this one leaves."""


class Captured:
    """A compiled step that is recorded once and then replayed with one launch.

    Weights, buffers and optimizer state are changed where they are; other inputs are copied to
    where the graph reads them, and outputs from where it leaves them, so that what a step has
    returned stays as it is.

    Args:
        step: What to capture.
        fixed: Which inputs are read and written where they are; the others are copied.
        changed: Which of these are written: the others are copied, too, once they are found to move, as
            does a buffer that every forward replaces.
    """

    def __init__(self, step: Compiled, fixed: Collection[int], changed: Collection[int]) -> None:
        self._step = step
        self._fixed = set(fixed)
        self._changed = set(changed)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._taken = 0
        self._refused = False
        self._static: list[Any] = []
        self._addresses: dict[int, int] = {}
        self._state_addresses: list[int] = []
        self._outputs: list[Any] = []

    def valid(self) -> bool:
        """Whether the optimizer's state is what the step was made for."""
        return self._step.valid()

    def lasting(self) -> bool:
        """Whether it may be valid again."""
        return self._step.lasting()

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """Takes the step."""
        if self._refused:
            return self._step.run(inputs)
        if self._taken < WARM_UP_STEPS:
            if self._taken == 0:
                free_matmul_workspaces()
            self._taken += 1
            return self._step.run(inputs)
        if self._graph is not None and self._moved(inputs):
            now = self._locate(inputs)
            self._fixed -= {i for i in now if now[i] != self._addresses[i] and i not in self._changed}
            self._graph = None
        if self._graph is None and not self._captured(inputs):
            return self._step.run(inputs)
        self._step.prepare()
        for index, (static, given) in enumerate(zip(self._static, inputs, strict=True)):
            if index not in self._fixed and isinstance(given, torch.Tensor):
                static.copy_(given, non_blocking=True)
        self._graph.replay()  # type: ignore[union-attr]
        self._step.finish()
        return [output.clone() if isinstance(output, torch.Tensor) else output for output in self._outputs]

    def _moved(self, inputs: Sequence[Any]) -> bool:
        """Whether a weight, a buffer or state is no longer where the graph reads it."""
        return self._addresses != self._locate(inputs) or self._state_addresses != self._locate_state()

    def _locate(self, inputs: Sequence[Any]) -> dict[int, int]:
        return {index: inputs[index].data_ptr() for index in self._fixed}

    def _locate_state(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self._step.tensors()]

    def _captured(self, inputs: Sequence[Any]) -> bool:
        """Captures the step, which does none of its work yet; returns whether it can be."""
        try:
            self._capture(inputs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # as for operations that look at a value, or that a capture may not have
            self._refused, self._static, self._outputs = True, [], []
            torch.cuda.synchronize()
            why = str(error).partition("\n")[0]
            announce(
                f"compile: the step is not replayed as one CUDA graph, which takes longer: {why}", level=logging.WARNING
            )
        return not self._refused

    def _capture(self, inputs: Sequence[Any]) -> None:
        self._graph, self._outputs = None, []
        self._static = [
            x if index in self._fixed or not isinstance(x, torch.Tensor) else x.clone()
            for index, x in enumerate(inputs)
        ]
        self._addresses = self._locate(inputs)
        self._state_addresses = self._locate_state()
        self._step.prepare()
        free_matmul_workspaces()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(priority=FIRST)):
            self._outputs = self._step.launch(self._static)
        free_matmul_workspaces()
        self._graph = graph
