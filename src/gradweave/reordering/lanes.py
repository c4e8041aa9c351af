"""Weight gradients beside the chain of input gradients, on a stream of their own."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch

from gradweave._runtime.split_calls.task import Task


class Beside:
    """On a second stream of a GPU, as soon as their inputs are there.

    A task's inputs were made by the first stream: they are kept until that stream has waited for the
    task, so that their memory is not used again while the second stream still reads it. What the second
    stream makes, the first uses only behind that wait; and since every task begins behind all that
    the first stream was given before, memory comes back to the second only when the first is through
    with it. So nothing needs to be recorded with the allocator, and a capture that begins and ends on
    the first stream holds all of it.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._done: WeakKeyDictionary[Task, torch.cuda.Event] = WeakKeyDictionary()

    def start(self, task: Task) -> None:
        """Lets the second stream compute the task, behind all that the first has been given so far."""
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            task.compute()
            self._done[task] = torch.cuda.Event()
            self._done[task].record()

    def wait(self, task: Task) -> None:
        """Lets the current stream wait for the task."""
        torch.cuda.current_stream(self.stream.device).wait_event(self._done[task])
