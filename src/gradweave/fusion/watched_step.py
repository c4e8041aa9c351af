"""A step in stock order that shows whether a loop's gradients can be used up in backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from gradweave._compat.autograd import NO_BACKWARD, current_backward
from gradweave._compat.tensors import are_kept, storage_users, version_of
from gradweave._runtime.backward import BackwardEnd
from gradweave._runtime.deferred.forbidden import ForbiddenGradient
from gradweave._runtime.replicas import digest
from gradweave.errors import GradweaveError

REMEDY = 'use mode="forward", which keeps gradients until step()'

_ORDER_WOULD_DIFFER = (
    'between backward() and step(): mode="backward" updates it during backward, so that the order would differ from '
    f"stock; change it after step(), or {REMEDY}"
)


def weight_changed(how: str = "") -> GradweaveError:
    """Return the error for a weight that the loop has changed between backward and step."""
    return GradweaveError(f"a weight was changed {how}{_ORDER_WOULD_DIFFER}")


class WatchedStep:
    """Sets the gradients of a step aside, and finds out what the loop does before step().

    A guard in ``.grad`` takes the place of each gradient as it arrives, so that a loop that reads or changes gradients
    is refused before any weight has changed.

    Args:
        guard_of: Returns the guard for a parameter's gradient.

    Attributes:
        gradients: Gradients of the last backward, in the order of their arrival.
        backwards_discarded: Number of whole backwards whose gradients the loop has cleared without a step.
    """

    def __init__(self, guard_of: Callable[[nn.Parameter], ForbiddenGradient]) -> None:
        self.gradients: dict[nn.Parameter, torch.Tensor] = {}
        self.backwards_discarded = 0
        self._guard_of = guard_of
        self._params: Sequence[nn.Parameter] = ()
        self._guards: dict[nn.Parameter, ForbiddenGradient] = {}
        self._versions: dict[nn.Parameter, int] = {}
        self._digests: dict[nn.Parameter, torch.Tensor] = {}
        self._backward = NO_BACKWARD
        self._is_whole = False
        self._is_kept = False
        self._end = BackwardEnd(self._backward_ended)

    def begin(self, params: Sequence[nn.Parameter]) -> None:
        """Watch the gradients of other parameters."""
        self._params = params

    def set_aside(self, p: nn.Parameter) -> None:
        """Replace the gradient that has just arrived in ``.grad`` by its guard."""
        if p.grad is None:
            return
        if p.grad.dtype is not p.dtype:
            raise GradweaveError(
                f"a gradient has type {p.grad.dtype} and its weight {p.dtype}: the model was converted after "
                "the forward; convert it before, or call zero_grad() and run the forward again"
            )
        if current_backward() != self._backward:
            self._begin_backward(p)
        self._is_kept |= are_kept([p.grad])  # counts references: no local variable may refer to the gradient
        self.gradients[p] = p.grad
        self._versions[p] = version_of(p)
        p.grad = self._guards[p] = self._guard_of(p)

    def _begin_backward(self, first: nn.Parameter) -> None:
        """Note the start of a backward; gradients of an earlier one have been used, cleared, or it has failed."""
        if self.gradients and all(p is first or p.grad is None for p in self.gradients):
            self.backwards_discarded += self._is_whole
            if self.backwards_discarded > 1:
                raise GradweaveError(
                    'gradients of a backward were cleared without a step(): mode="backward" would have updated the '
                    f"weights with them; no weight has been changed; {REMEDY}"
                )
            self.clear()
        self._backward = self._end.note()
        self._is_whole = False
        self._is_kept = False
        with torch.no_grad():
            self._digests = {p: digest(p.detach()) for p in self._params}

    def _backward_ended(self, _: int) -> None:
        self._is_whole = True

    def give_back(self) -> None:
        """Put the gradients back into ``.grad``."""
        for p, gradient in self.gradients.items():
            p.grad = gradient

    def abandon(self) -> None:
        """Put those gradients back whose guard is still in ``.grad``, and forget all."""
        for p, gradient in self.gradients.items():
            if p.grad is self._guards[p]:
                p.grad = None  # the model may have been converted meanwhile, and the guard have another type
                p.grad = gradient.to(p)
        self.clear()

    def clear(self) -> None:
        """Forget the gradients."""
        self.gradients = {}
        self._guards = {}
        self._versions = {}

    def end_step(self) -> None:
        """Forget the weights from before the step."""
        self._digests = {}

    @property
    def guarded(self) -> tuple[list[nn.Parameter], list[ForbiddenGradient], list[int]]:
        """Parameters with the guards and versions that they must still have at step()."""
        params = list(self.gradients)
        return params, [self._guards[p] for p in params], [self._versions[p] for p in params]

    def check_hidden_changes(self) -> None:
        """Raise for changes that versions do not show: weights written through .data, gradients that share memory."""
        if any(not torch.equal(digest(p.detach()), before) for p, before in self._digests.items()):
            raise weight_changed("through .data ")
        if self._is_kept or any(storage_users(gradient) > 1 for gradient in self.gradients.values()):
            raise GradweaveError(
                "a .grad is kept by the loop, or shares its memory with another tensor (a flat buffer of gradients?): "
                f'mode="backward" frees gradients during backward, and the other tensor would miss them; {REMEDY}'
            )
