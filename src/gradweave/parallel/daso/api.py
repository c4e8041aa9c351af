"""``DASO``: attaching to a training loop on several nodes, and letting go again."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from gradweave._compat.distributed import default_store, part_of_default_store
from gradweave._logging import announce
from gradweave._runtime.attachment import AccumulatingAttachment
from gradweave._runtime.claims import Technique, claim_model, claim_optimizer
from gradweave._runtime.peers.groups import common_name
from gradweave._runtime.peers.lockstep import Changes
from gradweave._runtime.peers.same_on_ranks import same_on_ranks
from gradweave._runtime.peers.shutdown import GroupShutdown
from gradweave._runtime.replicas import Averager, Lookout
from gradweave._runtime.wrapped_optimizers import without_wrapper
from gradweave.parallel.daso import checkpoint
from gradweave.parallel.daso.averaging import GradientAveraging, lend_ranks
from gradweave.parallel.daso.checks import check, check_averager, is_wrapped
from gradweave.parallel.daso.consensus import Agreement, Connections
from gradweave.parallel.daso.declaration import covers_all, declaration, replicas_of_node
from gradweave.parallel.daso.ending import Ending
from gradweave.parallel.daso.exchange import Exchange, Setup
from gradweave.parallel.daso.flat_buffers import Layout
from gradweave.parallel.daso.loss import LossScale, ReportedLoss
from gradweave.parallel.daso.merge_rules import DeltaRule, PaperRule
from gradweave.parallel.daso.node_group import NodeGroup
from gradweave.parallel.daso.options import Mode, OnFailure, Options, Pace, Payload
from gradweave.parallel.daso.replica import Replica
from gradweave.parallel.daso.rhythm import PaperRhythm, Rhythm
from gradweave.parallel.daso.topology import Groups, Topology
from gradweave.parallel.daso.training_loop import StepState, TrainingLoop
from gradweave.parallel.daso.transfer import chunks
from gradweave.schedule import Timeline, save_timelines


class DASO(AccumulatingAttachment):
    """Data parallelism over nodes with a slow network between them, under an unchanged training loop.

    The ranks of a node average gradients in every step, before ``backward()`` returns. Nodes exchange weights every few
    steps, in the background: one rank of each node sends, in turn, and some steps later all merge what has arrived. At
    the end call :meth:`finish`, or leave the object as a context manager: all ranks then have the same weights.

    Args:
        model: The model; rank 0's weights are given to all ranks. If it is a ``DistributedDataParallel``, that averages
            gradients inside the node.
        optimizer: The optimizer of its parameters.
        mesh: A mesh with dimensions ``"node"`` and ``"local"``; None for one made from ``LOCAL_WORLD_SIZE``.
        mode: ``"delta"`` merges by x + mean(sent) - own sent; ``"paper"`` by the published rules, which need
            :meth:`epoch_end` at the end of each epoch.
        every: Steps from one exchange to the next, in paper mode the most; None for a measured number.
        wait: Steps until an exchange is merged; None for as many as the transfer takes.
        pace: What a measured ``every`` follows besides: ``"time"``, nothing; ``"lr"``, rarer as the learning rate
            falls; ``"plateau"``, rarer at first, and halved when the loss stops falling.
        warm_up: Steps at the start in which all ranks average in every step; in paper mode epochs, None for 4.
        cool_down: The same at the end; needs ``total``.
        total: Steps of the whole training; in paper mode epochs.
        payload: Type that weights travel as.
        average_gradients: Whether to average gradients inside the node; False if a wrapper of yours does.
        on_failure: ``"raise"`` stops with an error if a node is lost; ``"continue"`` goes on without it.
        timeout: Seconds to wait for another node before it counts as lost.
        checkpoint_dir: Folder in which each rank leaves a checkpoint if it has to stop.
        scaler: The loop's ``GradScaler``, if it has one and there is a cool-down: nodes then agree on its scale.
        rhythm: The ``daso.rhythm`` of an earlier run, to be replayed.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        mesh: DeviceMesh | None = None,
        *,
        mode: Mode = "delta",
        every: int | None = None,
        wait: int | None = None,
        pace: Pace = "time",
        warm_up: int | None = None,
        cool_down: int | None = None,
        total: int | None = None,
        payload: Payload = "bfloat16",
        average_gradients: bool = True,
        on_failure: OnFailure = "raise",
        timeout: float = 300.0,
        checkpoint_dir: str | Path = "daso-checkpoint",
        scaler: torch.amp.GradScaler | None = None,
        rhythm: Iterable[tuple[int, int, int]] | None = None,
    ) -> None:
        optimizer = without_wrapper(optimizer)
        self._averages = average_gradients and not is_wrapped(model)
        with same_on_ranks(None, technique="DASO", alone=not covers_all(mesh)) as facts:
            self._options = Options(
                mode=mode,
                every=every,
                wait=wait,
                pace=pace,
                warm_up=warm_up,
                cool_down=cool_down,
                total=total,
                payload=payload,
                on_failure=on_failure,
                timeout=timeout,
                checkpoint_dir=Path(checkpoint_dir),
                rhythm=None if rhythm is None else tuple(rhythm),
            )
            self._topology = Topology.of(mesh)
            check(model, optimizer, self._topology, averages=self._averages)
            facts["mesh"] = str(self._topology.ranks)
        self._is_attached = True
        self._replica = Replica(model, optimizer)
        self._loss = ReportedLoss()
        self._scale = LossScale(scaler, self._replica.device)
        with ExitStack() as undo:
            self._attach(undo, mesh)
            # Last, since it cannot be undone.
            self.share_from_first_rank()
            self._undo = undo.pop_all()
        if self._topology.nodes == 1:
            places = self._topology.places
            what = f"gradients are averaged over its {places} ranks" if places > 1 else "training stays as it is"
            announce(
                f"DASO: one node: there is nothing to exchange, and {what}; to try several nodes, give a mesh",
                level=logging.WARNING,
            )

    def _attach(self, undo: ExitStack, mesh: DeviceMesh | None) -> None:
        """Make all parts and place the hooks.

        Args:
            undo: Undoes each of them when it is closed: now if a later one fails, or by :meth:`detach`.
            mesh: The user's.
        """
        replica, topology, options = self._replica, self._topology, self._options
        model, optimizer = replica.model, replica.optimizer
        self._groups = groups = Groups(
            topology, replica.device, mesh, timeout=options.group_timeout, node_timeout=options.node_timeout
        )
        # Also if neither finish() nor detach() is called: a finalizer runs before the interpreter goes down.
        shutdown = GroupShutdown(groups)
        undo.callback(weakref.finalize(self, shutdown.end))
        with same_on_ranks(groups.everyone, technique="DASO", alone=groups.everyone is None) as facts:
            lends = lend_ranks(optimizer, groups.node, undo)
            params, scales = replica.params(), self._scale.is_used
            facts |= declaration(options, model, optimizer, params, averages=self._averages, scales=scales)
        self._node = NodeGroup(topology, groups)
        connections, changes = self._connect()
        self._agreement = shutdown.conversation = Agreement(
            connections, node=topology.node, nodes=range(topology.nodes), timeout=options.timeout
        )
        rhythm = PaperRhythm(options) if options.mode == "paper" else Rhythm(options)
        self._exchange = Exchange(self._setup(lends), topology, groups, self._node, self._agreement, rhythm)
        averaging = GradientAveraging(self._exchange, self._node, replica.weights, is_own=self._averages)
        comparison = replicas_of_node(model, optimizer, replica.weights, groups.node)
        path = options.checkpoint_dir / f"rank{topology.rank}.pt"
        self._rescue = checkpoint.Rescue(path, self._rescued_states, self.detach)
        self._loop = TrainingLoop(
            replica,
            self._exchange,
            self._node,
            averaging,
            comparison,
            self._scale,
            self._rescue,
            averages=self._averages,
            lends=lends,
            changes=changes,
        )
        self._ending = Ending(
            self._loop,
            replica,
            topology,
            self._node,
            self._agreement,
            self._exchange,
            averaging,
            averages=self._averages,
        )
        self._loop.attach(undo)
        undo.callback(Lookout(model, self._check_averager).close)
        claim_model(model, Technique.DASO, self, undo)
        claim_optimizer(optimizer, Technique.DASO, self, undo)

    def _setup(self, lends: bool) -> Setup:
        options, replica = self._options, self._replica
        return Setup(
            rule=PaperRule() if options.mode == "paper" else DeltaRule(),
            payload=None if options.payload == "float32" else getattr(torch, options.payload),
            weights=replica.weights,
            buffers=replica.running_statistics(),
            state=replica.optimizer_state,
            scaling=self._scale.layout,
            settled=self._scale.restart_growth,
            lr=replica.lr,
            loss=self._loss.take,
            continues=options.on_failure == "continue",
            # Statistics of an optimizer are averaged over the node only: nodes would take different steps even with
            # gradients averaged over all of them.
            averages_gradients=self._averages and options.mode != "paper" and not lends,
        )

    def _connect(self) -> tuple[Connections, Changes | None]:
        """Return connections to a part of the common store that no other DASO uses.

        Each is a clone of the store: a thread that waits for a verdict holds up every other call on its connection.
        """
        if self._groups.everyone is None:
            return Connections(default_store, ready=0), None
        name = common_name("gradweave-daso", self._groups.everyone)
        changes = Changes(f"{name}/changes", technique="DASO", timeout=self._options.timeout)
        if self._groups.across is None:
            return Connections(default_store, ready=0), changes
        # By the published rules an exchange may be sent before the last one is merged. With one rank per node, it
        # carries both.
        carries_two = self._options.mode == "paper" and self._topology.places == 1
        return Connections(lambda: part_of_default_store(name), ready=2 if carries_two else 1), changes

    def _check_averager(self, found: Averager) -> None:
        check_averager(found, self._topology, averages=self._averages)

    @torch.no_grad()
    def share_from_first_rank(self) -> None:
        """Give all ranks the first one's weights and buffers; all must call it."""
        if self._groups.everyone is not None:
            tensors = [*self._replica.params(), *self._replica.model.buffers()]
            floating = Layout(tensors)
            vectors = floating.pack()
            integers = [t for t in tensors if not (t.is_floating_point() or t.is_complex())]
            for tensor in (*chunks(vectors), *integers):
                dist.broadcast(tensor, self._topology.ranks[0][0], group=self._groups.everyone)
            floating.store(vectors)
        self._exchange.weights_equal()

    def no_update(self) -> AbstractContextManager[None]:
        """Return a context for micro-batches: backwards inside neither average gradients nor count as steps."""
        return self._loop.paused()

    def observe(self, loss: torch.Tensor) -> None:
        """Report the loss of a batch, for ``pace="plateau"``: each exchange takes the mean since the last."""
        if not self._exchange.is_alone:
            self._loss.add(loss)

    def epoch_end(self, loss: torch.Tensor | float | None = None) -> None:
        """End an epoch; in paper mode all ranks must call it.

        Args:
            loss: Mean loss of the epoch on this rank; None to leave it out.
        """
        if loss is not None:
            self._loss.epoch = float(loss)
        if self._options.mode == "paper":
            self._loop.end_step_if_averaged()
            with self._rescue.on_lost_peer():
                if not self._node.is_single:
                    loss_sum = torch.tensor([self._loss.epoch], dtype=torch.float64)
                    self._node.sum_up_numbers(loss_sum, self.steps)
                    self._loss.epoch = float(loss_sum) / self._topology.places
                self._exchange.end_epoch(self.steps)
        self._exchange.stats.paused()

    @property
    def steps(self) -> int:
        """Training steps so far."""
        return self._loop.steps

    @property
    def rhythm(self) -> list[tuple[int, int, int]]:
        """History of changes: first exchange, steps between exchanges, steps until a merge."""
        return list(self._exchange.rhythm.changes)

    def stats(self) -> dict[str, float]:
        """Return bytes sent by this rank, exposed seconds, staleness and the like: plain numbers for any logger."""
        return {"steps": self.steps, **self._exchange.stats.as_dict(self._exchange.rhythm)}

    def timelines(self) -> tuple[Timeline, Timeline]:
        """Return the timeline simulated from measured times, and the measured one, on a rank that has exchanged."""
        topology = self._topology
        return self._exchange.stats.timelines(self._exchange.rhythm, topology.nodes, topology.places)

    def save_timeline(self, path: str | Path) -> None:
        """Draw :meth:`timelines` one above the other, as a picture or a trace."""
        save_timelines(self.timelines(), path)

    def explain(self) -> str:
        """Return what is done, and why."""
        if not self._is_attached:
            return "detached: this rank trains by itself"
        where = f"{self._topology.nodes} node(s) of {self._topology.places} rank(s)"
        inside = "gradients are averaged inside the node" if self._averages else "a wrapper averages inside the node"
        if self._exchange.is_alone:
            return f"{where}: {inside}, and there is no other node to exchange weights with"
        return f"{where}: {inside}; mode={self._options.mode!r}: {self._exchange.describe(self.steps)}"

    @property
    def is_attached(self) -> bool:
        """Whether it has been neither detached nor finished."""
        return self._is_attached

    def finish(self) -> None:
        """Wait for everything under way, make the weights of all ranks equal, and detach; all ranks must call it."""
        if self._is_attached:
            with self._rescue.on_lost_peer():
                self._ending.run()
            self.detach()

    def detach(self) -> None:
        """Let go at once: drop what is under way; each node keeps its weights."""
        if self._is_attached:
            self._is_attached = False
            self._undo.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()
        else:
            self.detach()

    def state_dict(self) -> dict[str, Any]:
        """Return everything that is needed to resume exactly here on this rank, with an exchange under way or not.

        Save it on every rank, together with the model's and the optimizer's.
        """
        self._loop.end_step_if_left_out()
        return self._state()

    def _state(self) -> dict[str, Any]:
        state = checkpoint.save(self._exchange, self._topology, self._replica.params(), self._replica.weights)
        return {**state, "steps": self.steps, "pending": self._loop.state.has_gradients}

    def _rescued_states(self) -> dict[str, Any]:
        # A rank is lost: what is under way will not arrive.
        self._exchange.flight = None
        model, optimizer = self._replica.model, self._replica.optimizer
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "daso": self._state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a checkpoint; all ranks must call it, after they have loaded model and optimizer.

        If each rank loads its own on the nodes that it was taken on, training resumes bit for bit. On other nodes it
        resumes from the first rank's.
        """
        params, weights = self._replica.params(), self._replica.weights
        is_own = checkpoint.is_own_state(state, self._topology, self._groups)
        self._resume_at(state["steps"], pending=state["pending"])
        # Exchanges are counted from the checkpoint on: numbers may come again that have votes in the store.
        connections, self._loop.changes = self._connect()
        self._agreement.use(connections)
        if is_own:
            checkpoint.check_weights(state, params)
            checkpoint.load(self._exchange, state, params, weights)
            self._exchange.drop_failed(self.steps)
            return
        announce(
            "checkpoints of other nodes, or of different steps: all ranks resume from what the first one has loaded",
            level=logging.WARNING,
        )
        checkpoint.load_on_other_nodes(self._exchange, state, params, weights)
        if self._groups.everyone is not None:
            optimizer = self._replica.optimizer
            box: list[Any] = [(optimizer.state_dict(), self._exchange.state(), state["steps"], state["pending"])]
            dist.broadcast_object_list(box, self._topology.ranks[0][0], group=self._groups.everyone)
            optimizer_state, exchange, steps, pending = box[0]
            self._resume_at(steps, pending=pending)
            if not self._topology.is_first:
                optimizer.load_state_dict(optimizer_state)
            self._exchange.restore(exchange)
        self._exchange.next_send = self.steps
        self.share_from_first_rank()

    def _resume_at(self, steps: int, *, pending: bool) -> None:
        self._loop.steps = steps
        self._loop.state = StepState.AVERAGED if pending else StepState.CLEAR
