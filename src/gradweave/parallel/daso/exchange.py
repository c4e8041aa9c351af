"""Exchanges between nodes: sent by one rank of each in turn, merged by all, or by none if one failed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from gradweave._logging import announce
from gradweave._runtime.peers.contact import is_lost_contact, lost_contact_as
from gradweave.errors import LostPeerError, UnsupportedError
from gradweave.parallel.daso.consensus import Agreement, Verdict, VerdictCodec, Vote
from gradweave.parallel.daso.failures import describe_lost, lost_nodes, reason_to_stop
from gradweave.parallel.daso.flat_buffers import Layout, Pool, Vectors
from gradweave.parallel.daso.merge_rules import Rule
from gradweave.parallel.daso.node_group import NodeGroup
from gradweave.parallel.daso.rhythm import Figures, Phase, Rhythm
from gradweave.parallel.daso.stats import Stats
from gradweave.parallel.daso.topology import Groups, Topology
from gradweave.parallel.daso.transfer import Transfer, chunks

COUNTERS = ("number", "rotation", "next_send")
"""Checkpointed counters that are equal on every rank."""


class Part(Enum):
    """This node's part in exchanges; only a node that contributes sends its own vectors, others send zeros.

    Transitions::

        TRAINING --run_out()--> DRAINING --merge--> STANDING_BY
                                    |                   |
                                    +--- fell_behind() -+--> BEHIND --settle()--> STANDING_BY

    In the final :meth:`Exchange.settle` nodes that stand by contribute once more: steps that they took after their last
    send count from then on.
    """

    TRAINING = auto()
    """The node has batches left."""
    DRAINING = auto()
    """The node has none left, and no exchange has been merged since."""
    STANDING_BY = auto()
    """An exchange has been merged since; the node follows the merges of the others."""
    BEHIND = auto()
    """The others have averaged gradients without the node, whose weights are of no use until nodes settle."""

    @property
    def contributes(self) -> bool:
        """Whether what the node sends counts."""
        return self in (Part.TRAINING, Part.DRAINING)


@dataclass(frozen=True)
class Setup:
    """The subjects and the policies of exchanges.

    Attributes:
        rule: Merge rule.
        payload: Dtype that weights travel in; None for their own.
        weights: Trained weights.
        buffers: Running statistics.
        state: Return the layout of the optimizer's present state.
        scaling: Return the layout of the scale of losses; an empty one without a scaler.
        settled: Called when the scale has become the same on all nodes.
        lr: Return the present learning rate.
        loss: Return the loss since the last exchange; not a number if none was reported.
        continues: Whether to go on without nodes that are lost.
        averages_gradients: Whether nodes that are together average gradients, rather than weights.
    """

    rule: Rule
    payload: torch.dtype | None
    weights: Layout
    buffers: Layout
    state: Callable[[], Layout]
    scaling: Callable[[], Layout]
    settled: Callable[[], None]
    lr: Callable[[], float]
    loss: Callable[[], float]
    continues: bool
    averages_gradients: bool


@dataclass
class Flight:
    """An exchange that was sent and is not merged yet.

    Attributes:
        number: Number of the exchange.
        place: Place of the rank that carries it, in each node.
        sent_at: Step after which it was sent.
        due: Step after which it is merged.
        staleness: Steps in between, for the rule; None if no node trains meanwhile.
        sent: Vectors that this node sent: weights, then statistics.
        weights: Number of tensors in the weights; more may have been added by the time of the merge.
        transfer: The transfer, on the rank that carries it.
        total: The sum, if it is known without a transfer: after a restart.
        verdict: The verdict, likewise.
    """

    number: int
    place: int
    sent_at: int
    due: int
    staleness: int | None
    sent: list[torch.Tensor]
    weights: int = 0
    transfer: Transfer | None = None
    total: list[torch.Tensor] | None = None
    verdict: Verdict | None = None


class Exchange:
    """One rank's part in all exchanges; ranks of a node call the same methods in the same order.

    Attributes:
        rhythm: The rhythm.
        stats: Times and sums.
        pool: Memory of vectors.
        part: This node's part.
        flight: The exchange that is under way; None if there is none.
        number: Exchanges so far.
        rotation: Exchanges so far whose carriers took turns; since the last epoch by the published rules.
        next_send: Step after which the next exchange is sent.
        all_done: Whether no node has batches left, as of the last verdict.
        trained: Steps that this node has trained, once it has no batches left; at the end, the most of any node.
    """

    def __init__(
        self, setup: Setup, topology: Topology, groups: Groups, node: NodeGroup, agreement: Agreement, rhythm: Rhythm
    ) -> None:
        self._setup = setup
        self._topology = topology
        self._groups = groups
        self._node = node
        self._agreement = agreement
        self._codec = VerdictCodec(topology.nodes)
        self.rhythm = rhythm
        self.stats = Stats()
        self.pool = Pool()
        self.part = Part.TRAINING
        self.flight: Flight | None = None
        self.number = 0
        self.rotation = 0
        self.next_send = 0
        self.all_done = False
        self.trained = 0
        self._has_warned = False
        # Where a node was lost, nodes may be a step apart: none averages gradients before this step.
        self._average_from = 0

    @property
    def is_alone(self) -> bool:
        """Whether there is no other node."""
        return self._groups.across is None

    @property
    def ranks(self) -> list[int]:
        """Global ranks of the nodes that take part."""
        return [rank for node in self._agreement.alive for rank in self._topology.ranks[node]]

    def describe(self, step: int) -> str:
        """Return in a line what nodes do at a step, and how often."""
        if self.together(step):
            what = "gradients" if self._setup.averages_gradients else "weights"
            return f"nodes average {what} in every step now"
        waits = f", which training waits for: it takes {self.rhythm.waits} steps" if self.rhythm.waits else ""
        return f"nodes exchange weights every {self.rhythm.every} step(s), merged {self.rhythm.wait} later{waits}"

    def together(self, step: int) -> bool:
        """Return whether nodes average in every step now."""
        return self.rhythm.phase(step) is Phase.TOGETHER and not self.is_alone

    def averages_gradients(self, step: int) -> bool:
        """Return whether nodes average gradients at a step."""
        return self.together(step) and self._setup.averages_gradients and step >= self._average_from

    def has_event(self, step: int) -> bool:
        """Return whether something happens at the end of a step in which all ranks of the node take part."""
        due = self.flight is not None and step >= self.flight.due
        return not self.is_alone and (due or self._sends(step) or self._comes_together(step))

    def next_event(self, step: int) -> int:
        """Return the first step from ``step`` on at whose end something happens, as far as is known now."""
        later = self.next_send if self.flight is None else min(self.next_send, self.flight.due)
        last = self.rhythm.last_step_apart(step)
        return max(step, later if last is None else min(later, last))

    def _sends(self, step: int) -> bool:
        """Return whether an exchange is sent at the end of a step."""
        if self.is_alone:
            return False
        if self.together(step):
            return not self._setup.averages_gradients
        return step >= self.next_send

    def _comes_together(self, step: int) -> bool:
        """Return whether nodes begin to average gradients in the next step, and must have the same weights."""
        return self._setup.averages_gradients and self.together(step + 1) and not self.together(step)

    def perform(self, step: int) -> None:
        """Send and merge what is due at the end of a step."""
        with self.stats.working():
            self._perform(step)

    def _perform(self, step: int) -> None:
        rule = self._setup.rule
        flight = self.flight
        due = flight is not None and (step >= flight.due or self._sends(step))
        if flight is not None and due and not rule.sends_first:
            self._land(flight, step)
        if self._sends(step):
            blocking = self.together(step)
            wait = 0 if blocking else self.rhythm.wait
            new = self._send(step, wait, None if blocking else wait)
            self.flight, self.next_send = new, step + self.rhythm.every
            if flight is not None and due and rule.sends_first:
                self._merge(flight, step)
            # A failure in the merge has dropped it. A node without batches merges at once: it has nothing to overlap.
            if self.flight is new and (wait == 0 or self.part is not Part.TRAINING):
                self._land(new, step)
        elif flight is not None and due and rule.sends_first:
            self._land(flight, step)
        if self._comes_together(step):
            self.settle(step)

    def _land(self, flight: Flight, step: int) -> None:
        self.flight = None
        self._merge(flight, step)

    def _send(
        self, step: int, wait: int, staleness: int | None, *, contributes: bool | None = None, wide: bool = False
    ) -> Flight:
        """Send an exchange.

        Args:
            step: The present step.
            wait: Steps until the merge.
            staleness: The same for the rule; None if no node trains meanwhile.
            contributes: Whether this node contributes; None for what its part says.
            wide: Whether to send full precision, and the scale of losses.
        """
        setup = self._setup
        place = self.rotation % self._topology.places
        self.rotation += 1
        whole = setup.rule.payload(setup.weights, self.pool)
        sent = self.pool.copy(whole, None if wide else setup.payload) + setup.buffers.pack(pool=self.pool)
        self.pool.give(whole)
        if wide:
            sent += setup.scaling().pack()
        weights = len(setup.weights.tensors)
        contributes = self.part.contributes if contributes is None else contributes
        return self._begin(Flight(self.number, place, step, step + wait, staleness, sent, weights), contributes)

    def _begin(self, flight: Flight, contributes: bool) -> Flight:
        self.number += 1
        if not contributes:
            flight.sent = [torch.zeros_like(vector) for vector in flight.sent]
        elif self._node.is_uneven:
            # Ranks that have run out of batches have older weights than those that train.
            self._node.broadcast(flight.sent, self._node.active[0], flight.sent_at)
        stats = self.stats
        figures = Figures(stats.vote_seconds, stats.step_seconds, self._setup.loss(), self._setup.lr(), stats.work)
        if flight.place == self._topology.place and self._groups.across is not None:
            size = -1 if self._node.is_uneven else self._setup.state().numel
            vote = Vote(
                True,
                contributes=contributes,
                done=self.part is not Part.TRAINING,
                steps=self.trained,
                state=size,
                figures=figures,
            )
            self.stats.sent(sum(v.nbytes for v in flight.sent), len(self._agreement.alive))
            flight.transfer = Transfer(
                flight.number, flight.sent, self._groups.across, self._agreement, vote, self.pool
            )
        return flight

    def _merge(self, flight: Flight, step: int, *, settle: bool = False) -> Verdict:
        verdict, total = self._arrive(flight, step)
        if verdict.counted:
            self.apply(flight, verdict, total, settle=settle)
            self.pool.give([*flight.sent, *total])
            if self.part is Part.DRAINING:
                self.part = Part.STANDING_BY
            self.stats.merged()
            self.all_done = verdict.done
            self.trained = max(self.trained, verdict.steps)
            self.rhythm.merged(flight.number, verdict.figures)
            self._warn_if_exposed()
            if flight.number == self.number - 1:
                # Not before it was due: a node without batches merges at once, and must not run ahead of the others.
                self.next_send = max(flight.sent_at + self.rhythm.every, flight.due)
        return verdict

    def _warn_if_exposed(self) -> None:
        """Warn, once, that training waits for exchanges."""
        if self.rhythm.waits and not self._has_warned:
            self._has_warned = True
            announce(
                f"an exchange between nodes takes about as long as {self.rhythm.waits} steps, and training waits for "
                f"it after {self.rhythm.wait}: nodes do not stay apart for longer unless asked to; give every= to "
                "allow it",
                level=logging.WARNING,
            )

    def apply(self, flight: Flight, verdict: Verdict, total: list[torch.Tensor], *, settle: bool = False) -> None:
        """Merge a sum into the weights, and set running statistics to the mean."""
        setup, contributing = self._setup, max(1, verdict.contributing)
        if verdict.contributing:
            layout = setup.weights.first(flight.weights)
            weights, buffers = layout.vector_count, setup.buffers.vector_count
            if settle:
                setup.rule.settle(layout, total[:weights], contributing)
            else:
                sent = flight.sent[:weights]
                setup.rule.merge(layout, sent, total[:weights], contributing, flight.staleness, self.pool)
            means = [vector.div(contributing) for vector in total[weights:]]
            setup.buffers.store(means[:buffers])
            if means[buffers:]:
                setup.scaling().store(means[buffers:])
                setup.settled()

    def _arrive(self, flight: Flight, step: int) -> tuple[Verdict, list[torch.Tensor]]:
        """Wait for an exchange; return its verdict and its sum, on all ranks of the node.

        If it failed, the nodes that are left form new groups, or an error says why training cannot go on.
        """
        began = time.perf_counter()
        carries = flight.place == self._topology.place
        verdict = flight.verdict
        if flight.transfer is not None:
            try:
                verdict = flight.transfer.result()
            except LostPeerError:
                verdict = Verdict(False)
        # The other ranks of the node have no connection to the store, and learn the verdict from the carrier.
        encoded = self._codec.encode(verdict) if carries and verdict is not None else None
        encoded = self._node.broadcast_numbers(encoded, self._codec.length, flight.place, step)
        verdict = self._codec.decode(encoded)
        self.stats.waited(time.perf_counter() - began)
        if not verdict.is_sound:
            self._fail(verdict, step, flight.due)
            return replace(verdict, counted=False), []
        total = flight.total or (flight.transfer.total if flight.transfer is not None else None)
        if total is None:
            total = [self.pool.take(len(vector), vector.dtype, vector.device) for vector in flight.sent]
        self._node.broadcast(total, flight.place, step)
        if flight.transfer is not None:
            self.stats.arrived(flight.transfer, step - flight.sent_at)
        return verdict, total

    def average_statistics(self, step: int) -> None:
        """Set running statistics to the mean of this node's ranks, if there is no other node."""
        vectors = self._setup.buffers.pack()
        self._node.sum_up(vectors, step)
        self._setup.buffers.store([vector.div_(self._topology.places) for vector in vectors])

    def settle(self, step: int, *, final: bool = False) -> None:
        """Make weights, statistics and optimizer state equal on all nodes, bit for bit.

        Args:
            step: The present step.
            final: Whether training ends: nodes that stand by then contribute too.
        """
        if self.flight is not None:
            self._land(self.flight, step)
        while not self.is_alone:
            contributes = self.part is not Part.BEHIND if final else self.part.contributes
            flight = self._send(step, 0, None, contributes=contributes, wide=True)
            verdict = self._merge(flight, step, settle=True)
            # If a node was lost, some may not have the sum: all settle again, among those that are left.
            if verdict.counted and self._settle_state(verdict, step, contributes):
                break
        if self.part is Part.BEHIND:
            self.part = Part.STANDING_BY

    def _settle_state(self, verdict: Verdict, step: int, contributes: bool) -> bool:
        """Set optimizer state to the mean of all nodes'; return whether no node was lost meanwhile."""
        state = self._setup.state()
        if verdict.state != state.numel or not state.numel:
            if verdict.state != 0:
                announce("optimizer states differ in size between nodes: each keeps its own", level=logging.WARNING)
            return True
        flight = Flight(self.number, 0, step, step, None, state.pack())
        verdict, total = self._arrive(self._begin(flight, contributes), step)
        if verdict.counted and verdict.contributing:
            state.store([vector.div_(verdict.contributing) for vector in total])
        return verdict.counted

    def end_epoch(self, step: int) -> None:
        """End an epoch by the published rules: average weights, and adapt the rhythm to the loss."""
        if not self.is_alone:
            if self.flight is not None:
                self._land(self.flight, step)
            flight = self._send(step, 0, None)
            verdict = self._merge(flight, step, settle=True)
            self.rhythm.epoch_ended(flight.number, verdict.figures)
        self.rotation, self.next_send = 0, step

    def average(self, vectors: Vectors, tail: Sequence[float], step: int) -> list[float] | None:
        """Sum gradients over nodes, in place.

        Args:
            vectors: Gradients, summed over this node.
            tail: Small integers to be summed with them.
            step: The present step.

        Returns:
            The sums of the tail; None if a node was lost meanwhile, and vectors stay as they are.
        """
        device = vectors[0].device if vectors else torch.device("cpu")
        numbers = torch.tensor([*tail, float(self.part is not Part.TRAINING)], dtype=torch.float32, device=device)
        # Of the roll call after a failure: the latest step of any node, then the nodes that answered; else empty.
        roll: list[float] = []
        sums = self.pool.copy([*vectors, numbers])
        began = time.perf_counter()
        if self._topology.place == 0 and self._groups.across is not None:
            try:
                for chunk in chunks(sums):
                    dist.all_reduce(chunk, group=self._groups.across)
                self.stats.sent(sum(v.nbytes for v in sums), len(self._agreement.alive))
            except RuntimeError as error:
                if not is_lost_contact(error):
                    raise
                try:
                    # Other nodes may have the sum, and notice the loss only in their next step: give them longer.
                    call = partial(self._agreement.roll_call, step, timeouts=2)
                    here, latest = self._agreement.ask(call, name="gradweave roll call").answer()
                    roll = [float(latest), *map(float, here)]
                except LostPeerError:
                    roll = [float(step)]
        padded = self._node.broadcast_numbers(roll, 1 + self._topology.nodes, 0, step)
        roll = [number for number in padded if number >= 0]
        self.stats.waited(time.perf_counter() - began)
        if roll:
            self._average_from = int(roll[0]) + 1
            here = tuple(int(node) for node in roll[1:])
            self._fail(Verdict(False, alive=here), step, step)
            return None
        self._node.broadcast(sums, 0, step)
        for vector, total in zip(vectors, sums, strict=False):
            vector.copy_(total)
        *rest, done = sums[-1].tolist()
        self.pool.give(sums)
        self.all_done = round(done) == len(self._agreement.alive)
        return list(rest)

    def run_out(self, steps: int) -> None:
        """Note that this node has no batches left after ``steps`` steps."""
        self.part = Part.DRAINING
        self.trained = steps

    def fell_behind(self) -> None:
        """Note that other nodes have averaged gradients and trained on, without this node."""
        self.part = Part.BEHIND

    def drop_failed(self, step: int) -> None:
        """Drop the exchange that was under way when a checkpoint was taken, if it is known to have failed."""
        if self.flight is not None:
            verdict = self.flight.verdict
            own = [float(verdict is not None and verdict.is_sound)]
            is_sound = self._node.broadcast_numbers(own, 1, self.flight.place, step)
            self.flight = self.flight if is_sound[0] > 0 else None

    def weights_added(self) -> None:
        """Note that weights were added, which no rank has trained yet."""
        self._setup.rule.extend(self._setup.weights)

    def weights_equal(self) -> None:
        """Note that all nodes have the same weights."""
        self._setup.rule.agree(self._setup.weights)

    def state(self) -> dict[str, Any]:
        """Return what all ranks have in common, for a checkpoint."""
        kept = {name: getattr(self, name) for name in COUNTERS}
        return {**kept, "rhythm": self.rhythm.state(), "anchor": [a.clone() for a in self._setup.rule.anchor]}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state` returned."""
        for name in COUNTERS:
            setattr(self, name, state[name])
        self.rhythm.restore(state["rhythm"])
        zeros = self._setup.weights.zeros()
        if [len(a) for a in state["anchor"]] not in ([], [len(z) for z in zeros]):
            reason = "it was taken with other trained weights"
            raise UnsupportedError("the state of DASO", reason, "freeze and unfreeze layers as when it was taken")
        self._setup.rule.anchor = [a.to(z.device, copy=True) for a, z in zip(state["anchor"], zeros, strict=False)]

    def share_added(self, tensors: list[torch.Tensor], step: int) -> None:
        """Give all ranks the first node's values of parameters that were added after the start."""
        layout = Layout(tensors)
        vectors = layout.pack()
        if self._topology.place == 0 and self._groups.across is not None:
            first = self._topology.ranks[self._agreement.alive[0]][0]
            message = f"a node was lost at step {step}, while new parameters were shared; restart from a checkpoint"
            with lost_contact_as(lambda _: LostPeerError(message, step=step)):
                for chunk in chunks(vectors):
                    dist.broadcast(chunk, first, group=self._groups.across)
        self._node.broadcast(vectors, 0, step)
        layout.store(vectors)

    def _fail(self, verdict: Verdict, step: int, due: int) -> None:
        """After an exchange that did not count, go on without the lost nodes, or raise an error that names them."""
        self.stats.failed += 1
        error = reason_to_stop(verdict, self._topology, step)
        if error is not None:
            raise error
        nodes = [node for node in self._agreement.alive if node not in verdict.alive]
        ranks = [rank for node in nodes for rank in self._topology.ranks[node]]
        if not self._setup.continues:
            raise lost_nodes(ranks, step)
        announce(f"{describe_lost(ranks, step)}: {len(verdict.alive)} nodes go on", level=logging.WARNING)
        self._agreement.regrouped(verdict.alive)
        # By the published rules another exchange may be under way, sent among the nodes before the loss. All have sent
        # it by now, and none merges it: its failure would have nodes call the roll a second time.
        self.flight = None
        message = f"the nodes that are left could not form a group at step {step}; restart from a checkpoint"
        with lost_contact_as(lambda _: LostPeerError(message, ranks=tuple(ranks), step=step)):
            self._groups.regroup(verdict.alive)
        self.next_send = min(self.next_send, max(step, due) + 1)
