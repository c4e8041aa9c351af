"""The weight gradient of one call as a task: computed once, at any time after the backward of its call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from gradweave._compat.tensors import version_of
from gradweave.errors import GradweaveError

Gradients = tuple[torch.Tensor | None, torch.Tensor | None]
"""The gradients of a weight and of its bias."""
Recorder = Callable[[int], AbstractContextManager[None]]
"""Return the context in which a layer's weight gradient is computed."""


class Task:
    """The weight gradient of one call of a layer.

    It is *computed* when its kernels have been launched; it keeps its inputs alive until it is *finished*, and its
    result until it is *taken*. On a GPU the two first differ: the kernels may run on another stream, and the memory of
    their inputs may only be used again once the stream that it belongs to has waited for them.

    Args:
        layer: Number of the layer, the same for all calls that use one weight.
        output_gradients: Inputs that it keeps alive, besides those that forward keeps alive anyway.
        compute: Returns the gradients.
        activations: Inputs that the forward has computed and kept; empty if the loop might write to them. Only a task
            whose activations are known may outlive its backward.

    Attributes:
        layer: Number of the layer.
        held_bytes: Bytes that stay alive until it is finished, besides those that forward keeps alive anyway.
        outlives_backward: Whether it is finished after the end of its backward.
    """

    def __init__(
        self,
        layer: int,
        output_gradients: Sequence[torch.Tensor],
        compute: Callable[[], Gradients],
        activations: Sequence[torch.Tensor] = (),
    ) -> None:
        self.layer = layer
        self.held_bytes = _size_in_bytes(output_gradients)
        self.outlives_backward = False
        self._compute: Callable[[], Gradients] | None = compute
        self._result: Gradients | None = None
        self._inputs = (*output_gradients, *activations) if activations else ()
        self._versions: tuple[int, ...] = ()

    @property
    def can_outlive_backward(self) -> bool:
        """Whether all of its inputs are known, and the forward's own."""
        return bool(self._inputs)

    def outlive_backward(self) -> None:
        """Let it be finished after the end of its backward; from then on it alone holds all of its inputs."""
        self.outlives_backward = True
        self.held_bytes = _size_in_bytes(self._inputs)
        self.watch_inputs()

    def watch_inputs(self) -> None:
        """Note the versions of its inputs, so that :meth:`check_inputs` finds changes in place."""
        # Autograd checks versions of saved tensors when a node unpacks them; these are read after their node has run.
        self._versions = tuple(map(version_of, self._inputs))

    def check_inputs(self) -> None:
        """Raise GradweaveError if an input that is watched was changed in place."""
        if self._versions and self._versions != tuple(map(version_of, self._inputs)):
            raise GradweaveError(
                "an activation was changed in place before the deferred weight gradient that needs it was computed; "
                'do not write to it there, or defer no weight gradients: policy="joint" instead of "cross_step", '
                'or "one_f_one_b" in a pipeline'
            )

    @property
    def is_finished(self) -> bool:
        """Whether its inputs are no longer needed."""
        return self._compute is None

    def compute(self) -> None:
        """Compute the gradients on the current stream, unless that was done; the inputs stay alive."""
        if self._result is None and self._compute is not None:
            self._result = self._compute()

    def record(self, recorder: Recorder) -> None:
        """Compute the gradients inside ``recorder(layer)``."""
        compute = self._compute

        def recorded() -> Gradients:
            with recorder(self.layer):
                return compute()  # type: ignore[misc]

        self._compute = recorded

    def then(self, change: Callable[[Gradients], Gradients]) -> None:
        """Apply a function to the gradients right where they are computed, on the same stream."""
        compute = self._compute
        self._compute = lambda: change(compute())  # type: ignore[misc]

    def finish(self) -> None:
        """Compute the gradients, unless that was done, and release the inputs."""
        self.compute()
        self.check_inputs()
        self._release_inputs()

    @property
    def result(self) -> Gradients:
        """The gradients, which the task keeps.

        Raises:
            GradweaveError: They were taken, or dropped.
        """
        if self._result is None:
            raise GradweaveError("a weight gradient is gone: it was taken, or its backward ended without it")
        return self._result

    def take(self) -> Gradients:
        """Return the gradients of a finished task, which does not keep them."""
        result = self.result
        self._result = None
        return result

    def drop(self) -> None:
        """Release inputs and results: the gradients are not wanted."""
        self._result = None
        self._release_inputs()

    def _release_inputs(self) -> None:
        self._compute = None
        self._inputs = ()
        self._versions = ()


def _size_in_bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
