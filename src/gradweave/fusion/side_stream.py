"""Updating a bucket on the stream where its gradients are still being computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from gradweave._compat.eager import at_end_of_backward
from gradweave._runtime.deferred.late import LateGradient, Source, settle_gradients


class UpdatesBeside:
    """Runs updates in backward behind their late gradients, and joins their stream with the backward's.

    One update is under way at a time: when the next begins, the backward's stream waits for the one before, and what
    that one has used is let go.
    """

    def __init__(self) -> None:
        self._under_way: _Update | None = None

    def run(self, params: Sequence[nn.Parameter], update: Callable[[], None]) -> None:
        """Updates parameters with the gradients in their ``.grad``, late or not."""
        late = [p.grad.source for p in params if type(p.grad) is LateGradient]
        stream = late[0].stream if late else None
        if stream is None:
            settle_gradients(params)
            update()
            return
        self.join()
        main = torch.cuda.current_stream(stream.device)
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            for p in params:
                if type(p.grad) is LateGradient:
                    p.grad = p.grad.source.ready()
            used = [p.grad for p in params]
            try:
                update()
            finally:
                self._under_way = _Update(main, stream.record_event(), late, used)
        at_end_of_backward(self.join)

    def join(self) -> None:
        """Lets the backward's stream, and the current one, wait for the update that is under way."""
        if self._under_way is not None:
            under_way, self._under_way = self._under_way, None
            for stream in (under_way.main, torch.cuda.current_stream(under_way.main.device)):
                stream.wait_event(under_way.done)
            for source in under_way.late:
                source.done(under_way.done)


@dataclass(frozen=True)
class _Update:
    """One that is under way.

    Attributes:
        main: The stream of the backward.
        done: What that has to wait for.
        late: Where gradients came from.
        used: Gradients, which are kept until then.
    """

    main: torch.cuda.Stream
    done: torch.cuda.Event
    late: Sequence[Source]
    used: Sequence[torch.Tensor | None]
