"""The lane of weight gradients that run on a second stream, beside the chain of input gradients."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch

from gradweave._runtime.split_calls.task import Task


class SideStreamLane:
    """A second stream of a GPU, on which each task begins as soon as its inputs have been made.

    No tensor is recorded with the allocator (``record_stream``), so that a CUDA graph that begins and ends on the first
    stream captures all of it. Instead:

    * The memory of a task's inputs belongs to the first stream. The task keeps them alive until the first stream has
      waited for the task, so that this memory is not used again while the second stream still reads it.
    * The memory of a task's result belongs to the second stream. The first stream uses the result only after it has
      waited for the task. Every task begins after all work that the first stream was given before, so when the second
      stream gets that memory back, the first has finished with it.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._ends: WeakKeyDictionary[Task, torch.cuda.Event] = WeakKeyDictionary()

    def start(self, task: Task) -> None:
        """Compute a task on the second stream, after everything that the current stream has been given so far."""
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            task.compute()
            self._ends[task] = torch.cuda.Event()
            self._ends[task].record()

    def wait(self, task: Task) -> None:
        """Let the current stream wait for a task."""
        torch.cuda.current_stream(self.stream.device).wait_event(self._ends[task])
