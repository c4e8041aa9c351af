"""Exchanges between nodes: sent by one rank of each in turn, merged by all, or by none if one failed."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from gradweave._logging import announce
from gradweave._runtime.peers.contact import is_lost_contact, lost_contact_as
from gradweave.errors import ArgumentError, LostPeerError
from gradweave.parallel.daso.cadence import Figures, Phase, Rhythm
from gradweave.parallel.daso.consensus import Agreement, Verdict, Vote
from gradweave.parallel.daso.failures import describe_lost, lost_nodes, reason_to_stop
from gradweave.parallel.daso.flat_buffers import Layout, Pool, Vectors
from gradweave.parallel.daso.merge_rules import Rule
from gradweave.parallel.daso.node_group import Mates
from gradweave.parallel.daso.stats import Record
from gradweave.parallel.daso.topology import Groups, Topology
from gradweave.parallel.daso.transfer import Transfer, chunks

COUNTERS = ("number", "rotation", "next_send")
"""What ranks of all nodes have the same of, in a checkpoint."""


@dataclass(frozen=True)
class Setup:
    """What exchanges are made of.

    Attributes:
        rule: What is sent and how it is merged.
        payload: Dtype that weights travel in; None for their own.
        weights: Those that are trained.
        buffers: Running statistics.
        state: The optimizer's state at present.
        scaling: The scale of losses, if there is one.
        settled: Called when all nodes have been made the same.
        lr: The learning rate at present.
        continues: Whether to go on without nodes that are lost.
        averages_gradients: Whether gradients are averaged here, and not by a wrapper of the user's.
    """

    rule: Rule
    payload: torch.dtype | None
    weights: Layout
    buffers: Layout
    state: Callable[[], Layout]
    scaling: Callable[[], Layout]
    settled: Callable[[], None]
    lr: Callable[[], float]
    continues: bool
    averages_gradients: bool


@dataclass
class Flight:
    """An exchange that is not merged yet.

    Attributes:
        number: Of the exchange.
        place: The rank of each node that carries it.
        sent_at: Step after which it was sent.
        due: Step after which it is merged.
        staleness: Steps in between, for the rule; None where nobody goes on meanwhile.
        sent: What this node sent: weights, then statistics.
        weights: How many tensors the weights are; there may be more by the time it is merged.
        transfer: On the rank that carries it.
        total: The sum, where it is known without a transfer: after a restart.
        verdict: Likewise.
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
    """One rank's part in all exchanges; ranks of a node call the same methods in the same order."""

    def __init__(
        self, setup: Setup, topology: Topology, groups: Groups, mates: Mates, agreement: Agreement, rhythm: Rhythm
    ) -> None:
        self._setup = setup
        self._topology = topology
        self._groups = groups
        self._mates = mates
        self._agreement = agreement
        self.rhythm = rhythm
        self.record = Record()
        self.pool = Pool()
        self.flight: Flight | None = None
        self.number = 0
        self.rotation = 0
        self.next_send = 0
        self.loss: Callable[[], float] = lambda: math.nan
        self.done = False
        """Whether this node has no batches left; it then takes part without holding anybody up."""
        self.all_done = False
        self.trained = 0
        """Steps that this node has trained, once it has no batches left; behind the end, the most that one has."""
        self._idle = False
        """Whether this node, which is done, has sent what it had."""
        self._told = False
        """Whether the user knows that training waits for exchanges."""
        self._from_step = 0
        """Where a node was lost, nodes may be a step apart: none averages gradients before this one."""
        self._behind = False
        """Whether others have trained on together since, so that its weights are of no use."""

    @property
    def alone(self) -> bool:
        """Whether there is no other node."""
        return self._groups.across is None

    def describe(self, step: int) -> str:
        """Return what nodes do at a step, and how often, in a line."""
        if self.together(step):
            what = "gradients" if self._setup.averages_gradients else "weights"
            return f"nodes average {what} in every step now"
        waits = f", which training waits for: it takes {self.rhythm.waits} steps" if self.rhythm.waits else ""
        return f"nodes exchange weights every {self.rhythm.every} step(s), merged {self.rhythm.wait} later{waits}"

    def together(self, step: int) -> bool:
        """Whether nodes average in every step now."""
        return self.rhythm.phase(step) is Phase.TOGETHER and not self.alone

    def averages_gradients(self, step: int) -> bool:
        """Whether they average gradients, rather than weights."""
        return self.together(step) and self._setup.averages_gradients and step >= self._from_step

    def involves_mates(self, step: int) -> bool:
        """Whether something happens at the end of a step that all ranks of the node have part in."""
        due = self.flight is not None and step >= self.flight.due
        return not self.alone and (due or self._sends(step) or self._comes_together(step))

    def next_event(self, step: int) -> int:
        """The first step from here on at whose end something happens, as far as that is known now."""
        later = self.next_send if self.flight is None else min(self.next_send, self.flight.due)
        border = self.rhythm.next_border(step)
        return max(step, later if border is None else min(later, border))

    def _sends(self, step: int) -> bool:
        if self.alone:
            return False
        if self.together(step):
            return not self._setup.averages_gradients
        return step >= self.next_send

    def _comes_together(self, step: int) -> bool:
        return self._setup.averages_gradients and self.together(step + 1) and not self.together(step)

    def perform(self, step: int) -> None:
        """Does what is due at the end of a step."""
        with self.record.working():
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
            if self.flight is new and (wait == 0 or self.done):
                self._land(new, step)
        elif flight is not None and due and rule.sends_first:
            self._land(flight, step)
        if self._comes_together(step):
            self.settle(step)

    def _land(self, flight: Flight, step: int) -> None:
        self.flight = None
        self._merge(flight, step)

    def _send(self, step: int, wait: int, staleness: int | None, *, wide: bool = False) -> Flight:
        setup, counts = self._setup, not (self._idle or self._behind)
        place = self.rotation % self._topology.places
        self.rotation += 1
        whole = setup.rule.payload(setup.weights, self.pool)
        sent = self.pool.copy(whole, None if wide else setup.payload) + setup.buffers.pack(pool=self.pool)
        self.pool.give(whole)
        if wide:
            sent += setup.scaling().pack()
        weights = len(setup.weights.tensors)
        return self._begin(Flight(self.number, place, step, step + wait, staleness, sent, weights), counts)

    def _begin(self, flight: Flight, counts: bool) -> Flight:
        self.number += 1
        if not counts:
            flight.sent = [torch.zeros_like(vector) for vector in flight.sent]
        elif self._mates.uneven:
            self._mates.share(flight.sent, self._mates.active[0], flight.sent_at)
        record = self.record
        figures = Figures(record.vote_seconds, record.step_seconds, self.loss(), self._setup.lr(), record.work)
        if flight.place == self._topology.place and self._groups.across is not None:
            size = -1 if self._mates.uneven else self._setup.state().numel
            vote = Vote(True, contributes=counts, done=self.done, steps=self.trained, state=size, figures=figures)
            self.record.sent(sum(v.nbytes for v in flight.sent), len(self._agreement.alive))
            flight.transfer = Transfer(
                flight.number, flight.sent, self._groups.across, self._agreement, vote, self.pool
            )
        return flight

    def _merge(self, flight: Flight, step: int, *, settle: bool = False) -> Verdict:
        verdict, total = self._arrive(flight, step)
        if verdict.counted:
            self.apply(flight, verdict, total, settle=settle)
            self.pool.give([*flight.sent, *total])
            self._idle = self.done
            self.record.merged()
            self.all_done = verdict.done
            self.trained = max(self.trained, verdict.steps)
            self.rhythm.merged(flight.number, verdict.figures)
            if self.rhythm.waits and not self._told:
                self._told = True
                what = f"an exchange between nodes takes about as long as {self.rhythm.waits} steps"
                then = f"training waits for it after {self.rhythm.wait}"
                why = "nodes do not stay apart for longer unless asked to; give every= to allow it"
                announce(f"{what}, and {then}: {why}", level=logging.WARNING)
            if flight.number == self.number - 1:
                # Not before it was due: a node that is done merges at once, and must not run ahead for that.
                self.next_send = max(flight.sent_at + self.rhythm.every, flight.due)
        return verdict

    def apply(self, flight: Flight, verdict: Verdict, total: list[torch.Tensor], *, settle: bool = False) -> None:
        """Merges a sum into the weights, and takes the mean of running statistics."""
        setup, contributing = self._setup, max(1, verdict.contributing)
        if verdict.contributing:
            layout = setup.weights.first(flight.weights)
            weights, buffers = len(layout.zeros()), len(setup.buffers.zeros())
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
        """The verdict and the sum of a flight, on all ranks of the node; deals with a failure."""
        began = time.perf_counter()
        carries = flight.place == self._topology.place
        verdict = flight.verdict
        if flight.transfer is not None:
            try:
                verdict = flight.transfer.result()
            except LostPeerError:
                verdict = Verdict(False)
        numbers = verdict.as_list() if carries and verdict is not None else None
        length = len(Verdict(False).as_list()) + self._topology.nodes
        verdict = Verdict.from_list(self._mates.tell(numbers, length, flight.place, step))
        self.record.waited(time.perf_counter() - began)
        if not verdict.sound:
            self._fail(verdict, step, flight.due)
            return replace(verdict, counted=False), []
        total = flight.total or (flight.transfer.total if flight.transfer is not None else None)
        if total is None:
            total = [self.pool.take(len(vector), vector.dtype, vector.device) for vector in flight.sent]
        self._mates.share(total, flight.place, step)
        if flight.transfer is not None:
            self.record.arrived(flight.transfer, step - flight.sent_at)
        return verdict, total

    def same_statistics(self, step: int) -> None:
        """Makes running statistics the mean of the node's ranks, where no other node has part in them."""
        vectors = self._setup.buffers.pack()
        self._mates.sum_up(vectors, step)
        self._setup.buffers.store([vector.div_(self._topology.places) for vector in vectors])

    def settle(self, step: int, *, final: bool = False) -> None:
        """Makes weights, statistics and optimizer state the same on all nodes, bit for bit."""
        if self.flight is not None:
            self._land(self.flight, step)
        while not self.alone:
            self._idle = self._idle and not final
            counts = not (self._idle or self._behind)
            verdict = self._merge(self._send(step, 0, None, wide=True), step, settle=True)
            if verdict.counted and self._settle_state(verdict, step, counts):
                break
        self._behind = False

    def _settle_state(self, verdict: Verdict, step: int, counts: bool) -> bool:
        """Makes optimizer state the mean of all nodes'; says whether nobody was lost meanwhile."""
        state = self._setup.state()
        if verdict.state != state.numel or not state.numel:
            if verdict.state != 0:
                what = "optimizer states differ in size between nodes, so that each keeps its own"
                announce(what, level=logging.WARNING)
            return True
        flight = Flight(self.number, 0, step, step, None, state.pack())
        verdict, total = self._arrive(self._begin(flight, counts), step)
        if verdict.counted and verdict.contributing:
            state.store([vector.div_(verdict.contributing) for vector in total])
        return verdict.counted

    def border(self, step: int) -> None:
        """The end of an epoch by the published rules: a plain average, and a look at the loss."""
        if not self.alone:
            if self.flight is not None:
                self._land(self.flight, step)
            flight = self._send(step, 0, None)
            verdict = self._merge(flight, step, settle=True)
            self.rhythm.epoch_ended(flight.number, verdict.figures)
        self.rotation, self.next_send = 0, step

    def average(self, vectors: Vectors, tail: Sequence[float], step: int) -> list[float] | None:
        """Sums gradients over nodes, in place, with a tail of numbers; None where a node was lost on the way."""
        device = vectors[0].device if vectors else torch.device("cpu")
        numbers = torch.tensor([*tail, float(self.done)], dtype=torch.float32, device=device)
        alive: list[float] = []
        sums = self.pool.copy([*vectors, numbers])
        began = time.perf_counter()
        if self._topology.place == 0 and self._groups.across is not None:
            try:
                for chunk in chunks(sums):
                    dist.all_reduce(chunk, group=self._groups.across)
                self.record.sent(sum(v.nbytes for v in sums), len(self._agreement.alive))
            except RuntimeError as error:
                if not is_lost_contact(error):
                    raise
                try:
                    # Others may have had the sum, and notice only in their next step.
                    call = partial(self._agreement.roll_call, step, timeouts=2)
                    here, latest = self._agreement.ask(call, name="gradweave roll call").answer()
                    alive = [float(latest), *map(float, here)]
                except LostPeerError:
                    alive = [float(step)]
        told = [number for number in self._mates.tell(alive, 1 + self._topology.nodes, 0, step) if number >= 0]
        self.record.waited(time.perf_counter() - began)
        if told:
            self._from_step = int(told[0]) + 1
            here = tuple(int(node) for node in told[1:])
            self._fail(Verdict(False, alive=here), step, step)
            return None
        self._mates.share(sums, 0, step)
        for vector, total in zip(vectors, sums, strict=False):
            vector.copy_(total)
        *rest, done = sums[-1].tolist()
        self.pool.give(sums)
        self.all_done = round(done) == len(self._agreement.alive)
        return list(rest)

    def behind(self) -> None:
        """Told that other nodes have gone on together, and left this one's weights behind."""
        self._behind = True

    def drop_failed(self, step: int) -> None:
        """Forgets what was under way when a checkpoint was taken, if it is known to have failed."""
        if self.flight is not None:
            verdict = self.flight.verdict
            told = self._mates.tell([float(verdict is not None and verdict.sound)], 1, self.flight.place, step)
            self.flight = self.flight if told[0] > 0 else None

    def extended(self) -> None:
        """Told that weights have come in, before anybody has trained them."""
        self._setup.rule.extend(self._setup.weights)

    def agree(self) -> None:
        """Told that all nodes have the same weights."""
        self._setup.rule.agree(self._setup.weights)

    def state(self) -> dict[str, Any]:
        """Counters and what nodes have in common, for a checkpoint."""
        kept = {name: getattr(self, name) for name in COUNTERS}
        return {**kept, "rhythm": self.rhythm.state(), "anchor": [a.clone() for a in self._setup.rule.anchor]}

    def take(self, state: dict[str, Any]) -> None:
        """Takes what :meth:`state` gave."""
        for name in COUNTERS:
            setattr(self, name, state[name])
        self.rhythm.restore(state["rhythm"])
        zeros = self._setup.weights.zeros()
        if [len(a) for a in state["anchor"]] not in ([], [len(z) for z in zeros]):
            raise ArgumentError("state", "of other weights", "freeze and unfreeze as when it was taken")
        self._setup.rule.anchor = [a.to(z.device, copy=True) for a, z in zip(state["anchor"], zeros, strict=False)]

    def share_new(self, tensors: list[torch.Tensor], step: int) -> None:
        """Gives everybody the first node's values of parameters that were not there at the start."""
        layout = Layout(tensors)
        vectors = layout.pack()
        if self._topology.place == 0 and self._groups.across is not None:
            first = self._topology.ranks[self._agreement.alive[0]][0]
            message = f"a node was lost at step {step}, while new parameters were shared; restart from a checkpoint"
            with lost_contact_as(lambda _: LostPeerError(message, step=step)):
                for chunk in chunks(vectors):
                    dist.broadcast(chunk, first, group=self._groups.across)
        self._mates.share(vectors, 0, step)
        layout.store(vectors)

    def _fail(self, verdict: Verdict, step: int, due: int) -> None:
        """An exchange did not count: goes on without those that are lost, or says who they are."""
        self.record.failed += 1
        error = reason_to_stop(verdict, self._topology, step)
        if error is not None:
            raise error
        nodes = [node for node in self._agreement.alive if node not in verdict.alive]
        ranks = [rank for node in nodes for rank in self._topology.ranks[node]]
        if not self._setup.continues:
            raise lost_nodes(ranks, step)
        announce(f"{describe_lost(ranks, step)}: {len(verdict.alive)} nodes go on", level=logging.WARNING)
        self._agreement.regrouped(verdict.alive)
        # With the published rules another one may be under way, sent among nodes that are no longer the same. Nobody
        # merges it: all have sent it by now, and a second failure would have nodes call the roll twice.
        self.flight = None
        message = f"the nodes that are left could not form a group at step {step}; restart from a checkpoint"
        with lost_contact_as(lambda _: LostPeerError(message, ranks=tuple(ranks), step=step)):
            self._groups.regroup(verdict.alive)
        self.next_send = min(self.next_send, max(step, due) + 1)
