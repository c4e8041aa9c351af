"""The weight gradient of one call: computed once, at any time after the backward of its call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from gradweave.errors import GradweaveError

Gradients = tuple[torch.Tensor | None, torch.Tensor | None]
"""The gradients of a weight and of its bias."""
Recorder = Callable[[int], AbstractContextManager[None]]
"""Return the context in which a layer's weight gradient is computed."""


class Task:
    """The weight gradient of one call of a layer.

    Attributes:
        layer: Of which weight; the same for all calls that use it.
        held: Bytes that stay alive until it is finished, besides those that forward keeps anyway.
        outlives: Whether it goes on past the end of its backward.
    """

    def __init__(
        self,
        layer: int,
        held: Sequence[torch.Tensor],
        compute: Callable[[], Gradients],
        made_by_model: Sequence[torch.Tensor] = (),
    ) -> None:
        """A task that is to be computed.

        Args:
            layer: Of which weight.
            held: What it keeps alive, besides what forward does.
            compute: Gives the gradients.
            made_by_model: What forward has kept for it, if nobody else is likely to write there later; a
                task may outlive its backward only then.
        """
        self.layer = layer
        self.held = _bytes_of(held)
        self.outlives = False
        self._compute: Callable[[], Gradients] | None = compute
        self._result: Gradients | None = None
        self._inputs = (*held, *made_by_model) if made_by_model else ()
        self._versions: tuple[int, ...] = ()

    @property
    def can_outlive(self) -> bool:
        """Whether its inputs are the model's own."""
        return bool(self._inputs)

    def outlive(self) -> None:
        """Notes that it goes on past its backward, and holds all of its inputs from then on."""
        self.outlives = True
        self.held = _bytes_of(self._inputs)
        self.watch_inputs()

    def watch_inputs(self) -> None:
        """Notes what its inputs are now, so that a change is found when it is finished."""
        self._versions = tuple(tensor._version for tensor in self._inputs)

    def check_inputs(self) -> None:
        """Raises if somebody has written to inputs that are watched."""
        if self._versions and self._versions != tuple(tensor._version for tensor in self._inputs):
            raise GradweaveError(
                "an activation was changed in place before the weight gradient that needs it, and waits, was computed; "
                'do not write to it there, or let none wait: policy="joint" instead of "cross_step", '
                'or "one_f_one_b" in a pipeline'
            )

    @property
    def is_finished(self) -> bool:
        """Whether its inputs are no longer needed."""
        return self._compute is None

    def compute(self) -> None:
        """Computes the gradients, on the current stream, unless it was done; the inputs stay alive."""
        if self._result is None and self._compute is not None:
            self._result = self._compute()

    def record(self, recorder: Recorder) -> None:
        """Has the gradients computed inside ``recorder(layer)``."""
        compute = self._compute

        def recorded() -> Gradients:
            with recorder(self.layer):
                return compute()  # type: ignore[misc]

        self._compute = recorded

    def then(self, change: Callable[[Gradients], Gradients]) -> None:
        """Has the gradients changed right where they are computed."""
        compute = self._compute
        self._compute = lambda: change(compute())  # type: ignore[misc]

    def finish(self) -> None:
        """Computes the gradients, unless it was done, and lets go of the inputs."""
        self.compute()
        self.check_inputs()
        self._compute = None
        self._inputs = ()
        self._versions = ()

    @property
    def result(self) -> Gradients:
        """The gradients, which it keeps."""
        if self._result is None:
            raise GradweaveError("a weight gradient is gone: it was taken, or its backward ended without it")
        return self._result

    def take(self) -> Gradients:
        """Hands the gradients of a finished task over; it does not keep them."""
        result = self.result
        self._result = None
        return result

    def drop(self) -> None:
        """Lets go of inputs and results: nobody will ask."""
        self._compute = self._result = None
        self._inputs = ()
        self._versions = ()


def _bytes_of(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
