"""The end of training: ranks and nodes that have run out of batches stand by until all have."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from gradweave.errors import LostPeerError
from gradweave.parallel.daso.averaging import GradientAveraging
from gradweave.parallel.daso.consensus import Agreement
from gradweave.parallel.daso.exchange import Exchange
from gradweave.parallel.daso.flat_buffers import Layout
from gradweave.parallel.daso.node_group import NodeGroup, Purpose
from gradweave.parallel.daso.replica import Replica
from gradweave.parallel.daso.topology import Topology
from gradweave.parallel.daso.training_loop import TrainingLoop


class Ending:
    """Ends training on all ranks with the same weights.

    Args:
        loop: The user's loop, for its steps.
        replica: Model and optimizer of this rank.
        topology: The nodes and their ranks.
        node: The ranks of this node.
        agreement: Votes with the other nodes.
        exchange: Exchanges with the other nodes.
        averaging: Averages gradients.
        averages: Whether DASO averages gradients inside the node, and not a wrapper.
    """

    def __init__(
        self,
        loop: TrainingLoop,
        replica: Replica,
        topology: Topology,
        node: NodeGroup,
        agreement: Agreement,
        exchange: Exchange,
        averaging: GradientAveraging,
        *,
        averages: bool,
    ) -> None:
        self._loop = loop
        self._replica = replica
        self._topology = topology
        self._node = node
        self._agreement = agreement
        self._exchange = exchange
        self._averaging = averaging
        self._averages = averages

    def run(self) -> None:
        """Stand by until all ranks are through, merge everything, and leave; all ranks call it."""
        self._loop.end_step_if_averaged()
        self._stand_by_in_node()
        self._stand_by_among_nodes()
        self._leave_store()

    def _stand_by_in_node(self) -> None:
        """Answer the other ranks of the node, without gradients, until none has batches left."""
        loop, node, exchange = self._loop, self._node, self._exchange
        while self._averages and not node.is_single:
            vectors = self._replica.weights.zeros()
            meeting = node.gather(Purpose.LEAVE, loop.steps, loop.no_flags(), vectors, active=False)
            if meeting.purpose is Purpose.LEAVE:
                break
            loop.compare()
            loop.steps = meeting.step
            if meeting.purpose is Purpose.STEP_END:
                exchange.perform(meeting.step)
                loop.steps += 1
            elif exchange.averages_gradients(meeting.step):
                self._averaging.across_nodes(vectors, meeting.fresh, len(meeting.active), meeting.step)
        if node.is_uneven:
            self._copy_from(node.active[0])
        node.active = tuple(range(self._topology.places))

    def _copy_from(self, place: int) -> None:
        """Give all ranks of the node the state of one that trained longest."""
        loop, node = self._loop, self._node
        step = node.broadcast_object(loop.steps, place, loop.steps)
        for layout in (Layout(self._replica.params()), Layout(self._replica.model.buffers())):
            vectors = layout.pack()
            node.broadcast(vectors, place, step)
            layout.store(vectors)
        own = (self._replica.optimizer.state_dict(), self._exchange.state())
        optimizer, exchange = node.broadcast_object(own, place, step)
        self._replica.optimizer.load_state_dict(optimizer)
        self._exchange.restore(exchange)
        loop.steps = step

    def _stand_by_among_nodes(self) -> None:
        """Take part in the exchanges of nodes that still train, then make all nodes equal."""
        loop, exchange = self._loop, self._exchange
        if exchange.is_alone:
            exchange.average_statistics(loop.steps)
        exchange.run_out(loop.steps)
        while not (exchange.is_alone or exchange.all_done):
            if exchange.averages_gradients(loop.steps):
                vectors = self._replica.weights.zeros()
                sums = exchange.average(vectors, [0.0, *loop.no_flags()], loop.steps)
                if sums is not None and sums[0]:
                    exchange.fell_behind()
            loop.steps = exchange.next_event(loop.steps)
            exchange.perform(loop.steps)
            loop.steps += 1
        exchange.settle(loop.steps, final=True)
        loop.steps = exchange.trained

    def _leave_store(self) -> None:
        """Keep the store's host in the program until all other ranks have read the last verdict."""
        if self._exchange.is_alone:
            return
        ranks = len(self._agreement.alive) * self._topology.places
        call = partial(self._agreement.leave, ranks, host=self._topology.rank == 0)
        # All weights are equal by now: a host that is lost here does no harm.
        with suppress(LostPeerError):
            self._agreement.ask(call, name="gradweave leave").answer()
