"""The user's training loop, followed through hooks: the ends of its backwards and of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from enum import Enum, auto
from typing import Any

import torch

from gradweave._runtime.backward import BackwardWatch
from gradweave._runtime.peers.lockstep import Changes
from gradweave._runtime.replicas import Replicas
from gradweave.errors import GradweaveError
from gradweave.parallel.daso.averaging import GradientAveraging
from gradweave.parallel.daso.checkpoint import Rescue
from gradweave.parallel.daso.exchange import Exchange
from gradweave.parallel.daso.loss import LossScale
from gradweave.parallel.daso.node_group import NodeGroup, Purpose
from gradweave.parallel.daso.replica import Replica


class StepState(Enum):
    """Progress within one training step.

    Transitions::

        CLEAR ------backward ends--> AVERAGED --step() begins--> STEPPING_AVERAGED --step() ends: counts--> CLEAR
        CLEAR ------step() begins--> STEPPING --a closure's backward ends--> STEPPING_AVERAGED
        STEPPING ---step() ends----> CLEAR      (without gradients it does not count)
        AVERAGED ---backward ends--> AVERAGED   (accumulated; or, if gradients were cleared, a step was left out)

    A left-out step, as by a ``GradScaler``, counts as soon as it is noticed: the other ranks have taken it.
    """

    CLEAR = auto()
    """No gradients have been averaged since the last step."""
    AVERAGED = auto()
    """A backward has ended, and its gradients are averaged."""
    STEPPING = auto()
    """``optimizer.step()`` runs, without averaged gradients."""
    STEPPING_AVERAGED = auto()
    """``optimizer.step()`` runs, with averaged gradients."""

    @property
    def has_gradients(self) -> bool:
        """Whether gradients have been averaged since the last step."""
        return self in (StepState.AVERAGED, StepState.STEPPING_AVERAGED)

    def after_backward(self) -> StepState:
        """Return the state after a backward has ended."""
        is_stepping = self in (StepState.STEPPING, StepState.STEPPING_AVERAGED)
        return StepState.STEPPING_AVERAGED if is_stepping else StepState.AVERAGED

    def after_step_begin(self) -> StepState:
        """Return the state after ``optimizer.step()`` has begun."""
        return StepState.STEPPING_AVERAGED if self.has_gradients else StepState.STEPPING


class TrainingLoop:
    """Hooks on the user's loop: average gradients after a backward, perform exchanges after a step.

    Args:
        replica: Model and optimizer of this rank.
        exchange: Exchanges with other nodes.
        node: The ranks of this node.
        averaging: Averages gradients.
        comparison: Compares the weights of this node's ranks now and then; None for a single rank.
        scale: Scale of losses.
        rescue: Leaves a checkpoint if ranks are lost.
        averages: Whether DASO averages gradients inside the node, and not a wrapper.
        lends: Whether the optimizer averages statistics over the node's ranks in each step.

    Attributes:
        state: Progress within the present step.
        steps: Training steps so far.
        changes: Agreement on parameters that are added; None for a single rank.
    """

    def __init__(
        self,
        replica: Replica,
        exchange: Exchange,
        node: NodeGroup,
        averaging: GradientAveraging,
        comparison: Replicas | None,
        scale: LossScale,
        rescue: Rescue,
        *,
        averages: bool,
        lends: bool,
        changes: Changes | None,
    ) -> None:
        self._replica = replica
        self._exchange = exchange
        self._node = node
        self._averaging = averaging
        self._comparison = comparison
        self._scale = scale
        self._rescue = rescue
        self._averages = averages
        self._lends = lends
        self.changes = changes
        self.state = StepState.CLEAR
        self.steps = 0
        self._watch = BackwardWatch(self._backward_ended, technique="DASO")

    def attach(self, undo: ExitStack) -> None:
        """Place the hooks.

        Args:
            undo: Removes them when it is closed.
        """
        undo.callback(self._watch.detach)
        self._watch.refresh(self._replica.params())
        optimizer = self._replica.optimizer
        undo.callback(optimizer.register_step_pre_hook(self._step_begins).remove)
        undo.callback(optimizer.register_step_post_hook(self._step_ended).remove)

    def paused(self) -> AbstractContextManager[None]:
        """Return a context whose backwards only accumulate."""
        return self._watch.paused()

    def no_flags(self) -> list[int]:
        """Return flags, one for each parameter, that say that none has a new gradient."""
        return [0] * len(self._replica.params())

    def _backward_ended(self) -> None:
        if self.state is StepState.AVERAGED and self._watch.cleared:
            # A step was left out, as by gradient scaling.
            before = self._scale.value
            self.end_step()
            self._scale.rescale(self._replica.weights.tensors, before)
        with self._rescue.on_lost_peer():
            params = self._replica.params()
            self._watch.refresh(params)
            self._include(params)
            self._averaging.average(params, self._watch.take_fresh(params), self.steps)
            self.compare()
        self._watch.remember(self._replica.weights.tensors)
        self.state = self.state.after_backward()

    def _step_begins(self, *_: Any) -> None:
        if not self.state.has_gradients and self._watch.notice(self._replica.params()) and self._replica.moves():
            # The user set gradients without a backward, or all backwards were inside of no_update().
            if self._scale.is_used:
                raise GradweaveError(
                    "a GradScaler has seen gradients before their average; leave the last backward out of no_update()"
                )
            self._backward_ended()
        self.state = self.state.after_step_begin()

    def _step_ended(self, *_: Any) -> None:
        counts = self.state.has_gradients
        self._watch.remember(self._replica.weights.tensors)
        if counts:
            self.end_step()
        self.state = StepState.CLEAR

    def end_step_if_averaged(self) -> None:
        """Count a step whose gradients are averaged: at the end of an epoch or of training, it was left out."""
        if self.state.has_gradients:
            self.end_step()

    def end_step_if_left_out(self) -> None:
        """Count a step whose gradients were averaged and cleared again."""
        if self.state.has_gradients and self._watch.cleared:
            self.end_step()

    def end_step(self) -> None:
        """Count a step, and perform the exchanges that are due."""
        self.state = StepState.CLEAR
        self._exchange.stats.stepped()
        with self._rescue.on_lost_peer():
            step = self.steps
            has_event = self._exchange.has_event(step)
            if self._node.is_uneven and has_event:
                # Ranks without batches stand by in a gather: call them to take part.
                self._node.gather(Purpose.STEP_END, step, self.no_flags(), [], active=True)
            if self._comparison is not None and has_event and not self._averages:
                # With a wrapper of the user's, this is the only point that all ranks of the node are known to reach.
                self._comparison.check_now_and_then()
            self.steps += 1
            self._exchange.perform(step)

    def compare(self) -> None:
        """Raise an error if the weights of this node's ranks differ, in rounds that are due."""
        if self._node.is_uneven and self._lends:
            raise GradweaveError(
                f"{type(self._replica.optimizer).__name__} averages over the ranks of a node in each step, and one of "
                "them has run out of batches; give all ranks of a node as many"
            )
        if self._comparison is not None and not self._node.is_uneven and self._averages:
            self._comparison.check_now_and_then()

    def _include(self, params: Sequence[torch.Tensor]) -> None:
        """Include parameters that were added, or are trained from now on, after all ranks agree on them."""
        if not self._replica.has_grown(params):
            return
        if self._node.is_uneven:
            raise GradweaveError(
                "parameters cannot be added once a rank has run out of batches; give all ranks as many batches"
            )
        if self.changes is not None:
            # Before the first message that is longer: one rank's would meet the shorter one of another.
            trained = ",".join(str(number) for number, p in enumerate(params) if p.requires_grad)
            self.changes.agree("parameters have come in, or are trained from now on,", trained, self._exchange.ranks)
        added = self._replica.added(params)
        if added:
            self._exchange.share_added(added, self.steps)
        if self._replica.include(params):
            self._exchange.weights_added()
