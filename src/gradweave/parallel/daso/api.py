"""``DASO``: attaching to a training loop on several nodes, and letting go again."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from itertools import chain
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
from gradweave._runtime.backward import BackwardWatch
from gradweave._runtime.claims import Technique, claim_model, claim_optimizer
from gradweave._runtime.peers.groups import common_name
from gradweave._runtime.peers.lockstep import Changes
from gradweave._runtime.peers.same_on_ranks import same_on_ranks
from gradweave._runtime.peers.shutdown import GroupShutdown
from gradweave._runtime.replicas import Averager, Lookout
from gradweave._runtime.wrapped_optimizers import without_wrapper
from gradweave.errors import GradweaveError, LostPeerError
from gradweave.parallel.daso import checkpoint
from gradweave.parallel.daso.averaging import Averaging
from gradweave.parallel.daso.cadence import PaperRhythm, Rhythm
from gradweave.parallel.daso.checks import check, check_averager, everything_trained, is_wrapped
from gradweave.parallel.daso.consensus import Agreement, Connections
from gradweave.parallel.daso.declaration import covers_all, declaration, replicas_of_node
from gradweave.parallel.daso.exchange import Exchange, Setup
from gradweave.parallel.daso.flat_buffers import Layout
from gradweave.parallel.daso.lending import lend
from gradweave.parallel.daso.loss_scale import LossScale
from gradweave.parallel.daso.losses import Losses
from gradweave.parallel.daso.merge_rules import DeltaRule, PaperRule
from gradweave.parallel.daso.node_group import Call, Mates
from gradweave.parallel.daso.options import Options
from gradweave.parallel.daso.rescue import leaving_a_checkpoint
from gradweave.parallel.daso.topology import Groups, Topology
from gradweave.parallel.daso.transfer import chunks
from gradweave.schedule import Timeline, save_timelines


class DASO(AccumulatingAttachment):
    """Data parallel over nodes with a slow network between them, under an unchanged training loop.

    Ranks of a node average gradients in every step, before ``backward()`` returns. Nodes exchange weights
    every so many steps, in the background: one rank of each node sends, in turn, and some steps later all
    merge what has arrived. Afterwards call :meth:`finish`, or leave it as a context manager: all ranks
    then have the same weights.

    Args:
        model: What is trained; rank 0's weights are given to all. If it is a ``DistributedDataParallel``,
            that averages gradients inside the node.
        optimizer: Of its parameters.
        mesh: With dimensions ``"node"`` and ``"local"``; made from ``LOCAL_WORLD_SIZE`` if absent.
        mode: ``"delta"`` merges by x + mean(sent) - own sent; ``"paper"`` by the published rules, which
            need :meth:`epoch_end` at the end of each epoch.
        every: Steps from one exchange to the next; measured if absent. In paper mode the most there are.
        wait: Steps until an exchange is merged; measured if absent: as many as the transfer takes.
        pace: What else ``every`` follows, if it is not given: ``"time"``, nothing; ``"lr"``, rarer as
            the learning rate falls; ``"plateau"``, rarer at first, and halved when the loss stops falling.
        warm_up: Steps (epochs in paper mode, 4 if absent) in which all ranks average in every step.
        cool_down: The same, at the end; needs ``total``.
        total: Steps (epochs) of the whole training.
        payload: What weights travel as: ``"bfloat16"``, ``"float16"`` or ``"float32"``.
        average_gradients: Whether to average gradients inside the node; False where a wrapper of yours does.
        on_failure: ``"raise"`` stops with an error if a node is lost; ``"continue"`` goes on without it.
        timeout: Seconds to wait for another node before it counts as lost.
        checkpoint_dir: Where each rank leaves a checkpoint if it has to stop.
        scaler: The loop's ``GradScaler``, if it has one and there is a cool-down: nodes then agree on its scale.
        rhythm: A record of an earlier run, its ``daso.rhythm``, to be replayed.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        mesh: DeviceMesh | None = None,
        *,
        mode: str = "delta",
        every: int | None = None,
        wait: int | None = None,
        pace: str = "time",
        warm_up: int | None = None,
        cool_down: int | None = None,
        total: int | None = None,
        payload: str = "bfloat16",
        average_gradients: bool = True,
        on_failure: str = "raise",
        timeout: float = 300.0,
        checkpoint_dir: str | Path = "daso-checkpoint",
        scaler: torch.amp.GradScaler | None = None,
        rhythm: Iterable[tuple[int, int, int]] | None = None,
    ) -> None:
        optimizer = without_wrapper(optimizer)
        self._averages = average_gradients and not is_wrapped(model)
        with same_on_ranks(None, technique="DASO", alone=not covers_all(mesh)) as facts:
            self._options = Options(
                mode=mode, every=every, wait=wait, pace=pace, warm_up=warm_up, cool_down=cool_down, total=total,
                payload=payload, on_failure=on_failure, timeout=timeout, checkpoint_dir=Path(checkpoint_dir),
                rhythm=None if rhythm is None else tuple(rhythm),
            )  # fmt: skip
            self._topology = Topology.of(mesh)
            check(model, optimizer, self._topology, averages=self._averages)
            facts["mesh"] = str(self._topology.ranks)
        self._model = model
        self._optimizer = optimizer
        self._detached = False
        self._pending = False
        self._stepping = False
        self._steps = 0
        self._changes: Changes | None = None
        self._losses = Losses()
        self._device = next((p.device for p in self._params()), torch.device("cpu"))
        self._scale = LossScale(scaler, self._device)
        with ExitStack() as undo:
            self._attach(undo, mesh)
            # Last, since it is what cannot be undone.
            self.share_from_first_rank()
            self._undo = undo.pop_all()
        if self._topology.nodes == 1:
            places = self._topology.places
            what = f"gradients are averaged over its {places} ranks" if places > 1 else "training stays as it is"
            message = f"DASO: one node: there is nothing to exchange, and {what}; for nodes of your own give a mesh"
            announce(message, level=logging.WARNING)

    def _attach(self, undo: ExitStack, mesh: DeviceMesh | None) -> None:
        """Makes and hooks all there is.

        Args:
            undo: Told of each part how it is taken off again, now if a later one fails, or by :meth:`detach`.
            mesh: The user's.
        """
        model, optimizer, topology = self._model, self._optimizer, self._topology
        self._groups = groups = Groups(
            topology, self._device, mesh, timeout=self._options.group_timeout, node_timeout=self._options.node_timeout
        )
        # Where neither finish() nor detach() is called: before the interpreter goes down.
        shutdown = GroupShutdown(groups)
        undo.callback(weakref.finalize(self, shutdown.end))
        with same_on_ranks(groups.everyone, technique="DASO", alone=groups.everyone is None) as facts:
            self._lends = lend(optimizer, groups.mates, undo)
            facts |= declaration(
                self._options,
                model,
                optimizer,
                self._params(),
                averages=self._averages,
                scales=self._scale.used,
            )
        self._mates = Mates(topology, groups)
        self._known = {id(p) for p in self._params()}
        self._weights = Layout(p for p in self._params() if p.requires_grad)
        self._exchange = self._make_exchange()
        shutdown.conversation = self._agreement
        self._averaging = Averaging(self._exchange, self._mates, self._weights, ours=self._averages)
        self._replicas = replicas_of_node(model, optimizer, self._weights, groups.mates)
        self._watch = BackwardWatch(self._backward_ended)
        undo.callback(self._watch.detach)
        self._watch.refresh(self._params())
        undo.callback(optimizer.register_step_pre_hook(self._step_begins).remove)
        undo.callback(optimizer.register_step_post_hook(self._step_ended).remove)
        undo.callback(Lookout(model, self._found).close)
        claim_model(model, Technique.DASO, self, undo)
        claim_optimizer(optimizer, Technique.DASO, self, undo)

    def _buffers(self) -> list[tuple[str, torch.Tensor]]:
        """Running statistics, by name."""
        return [(name, b) for name, b in self._model.named_buffers() if _is_running(name)]

    def _found(self, averager: Averager) -> None:
        """Told by the lookout what else averages."""
        check_averager(averager, self._topology, averages=self._averages)

    def _make_exchange(self) -> Exchange:
        options, topology = self._options, self._topology
        paper = options.mode == "paper"
        setup = Setup(
            rule=PaperRule() if paper else DeltaRule(),
            payload=None if options.payload == "float32" else getattr(torch, options.payload),
            weights=self._weights,
            buffers=Layout(b for _, b in self._buffers()),
            state=self._optimizer_state,
            scaling=self._scale.layout,
            settled=self._scale.settled,
            lr=lambda: float(self._optimizer.param_groups[0].get("lr", math.nan)),
            continues=options.on_failure == "continue",
            # Vectors that are lent a group are the node's own: with gradients of all nodes, weights would differ.
            averages_gradients=self._averages and not paper and not self._lends,
        )
        agreement = self._agreement = Agreement(
            self._stores(), node=topology.node, nodes=range(topology.nodes), timeout=options.timeout
        )
        rhythm = PaperRhythm(options) if paper else Rhythm(options)
        exchange = Exchange(setup, topology, self._groups, self._mates, agreement, rhythm)
        exchange.loss = self._losses.take
        return exchange

    def _stores(self) -> Connections:
        """Connections to a part of the common store that no other DASO uses.

        Each is a clone of the store: on one connection, a thread that waits for a verdict would hold up the others.
        """
        if self._groups.everyone is None:
            return Connections(default_store, ready=0)
        name = common_name("gradweave-daso", self._groups.everyone)
        self._changes = Changes(f"{name}/changes", technique="DASO", timeout=self._options.timeout)
        if self._groups.across is None:
            return Connections(default_store, ready=0)
        # With one rank per node and the published rules, that one carries two exchanges at a time.
        both = self._options.mode == "paper" and self._topology.places == 1
        return Connections(lambda: part_of_default_store(name), ready=2 if both else 1)

    @property
    def _is_first(self) -> bool:
        return self._topology.rank == self._topology.ranks[0][0]

    def _params(self) -> list[torch.Tensor]:
        return everything_trained(self._model, self._optimizer)

    def _optimizer_state(self) -> Layout:
        """Tensors of the optimizer's state that belong to single weights: moments, not step counts."""
        tensors: list[torch.Tensor] = []
        for p in chain(*(group["params"] for group in self._optimizer.param_groups)):
            state = self._optimizer.state.get(p, {})
            moments = [state[key] for key in sorted(state) if key != "step"]
            tensors += [m for m in moments if isinstance(m, torch.Tensor) and m.shape == p.shape]
        return Layout(tensors)

    @torch.no_grad()
    def share_from_first_rank(self) -> None:
        """Gives all ranks the first one's weights and buffers; all must call it."""
        if self._groups.everyone is not None:
            tensors = [*self._params(), *self._model.buffers()]
            floating = Layout(tensors)
            vectors = floating.pack()
            whole = [t for t in tensors if not (t.is_floating_point() or t.is_complex())]
            for tensor in (*chunks(vectors), *whole):
                dist.broadcast(tensor, self._topology.ranks[0][0], group=self._groups.everyone)
            floating.store(vectors)
        self._exchange.agree()

    # The loop: what happens at the end of a backward and of a step.

    def _backward_ended(self) -> None:
        if self._pending and self._watch.cleared and not self._stepping:
            # A step has been left out, as gradient scaling does.
            before = self._scale.value
            self._tick()
            self._scale.rescale(self._weights.tensors, before)
        with self._leaving_a_checkpoint():
            params = self._params()
            self._watch.refresh(params)
            self._take_in(params)
            self._averaging.average(params, self._watch.take_fresh(params), self._steps)
            self._compare()
        self._watch.remember(self._weights.tensors)
        self._pending = True

    def _compare(self) -> None:
        """Now and then, whether the ranks of this node still have the same weights."""
        if self._mates.uneven and self._lends:
            raise GradweaveError(
                f"{type(self._optimizer).__name__} averages over the ranks of a node in each step, and one of them has "
                "run out of batches; give all ranks of a node as many"
            )
        if self._replicas is not None and not self._mates.uneven and self._averages:
            self._replicas.check_now_and_then()

    def _take_in(self, params: Sequence[torch.Tensor]) -> None:
        """Parameters that are trained from now on; those that were not there at the start must become the same."""
        new = [p for p in params if id(p) not in self._known]
        grown = any(p.requires_grad and p not in self._weights for p in params)
        if (new or grown) and self._mates.uneven:
            what = "parameters cannot come in once a rank has run out of batches; give all ranks as many"
            raise GradweaveError(what)
        if new or grown:
            self._agree_on_trained(params)
        if new:
            self._known.update(id(p) for p in new)
            self._exchange.share_new(new, self._steps)
        if self._weights.extend(p for p in params if p.requires_grad):
            self._exchange.extended()

    def _agree_on_trained(self, params: Sequence[torch.Tensor]) -> None:
        """Sees to it that all ranks come to train the same at the same step, before they send what others do not."""
        if self._changes is not None:
            ranks = [rank for node in self._agreement.alive for rank in self._topology.ranks[node]]
            trained = ",".join(str(n) for n, p in enumerate(params) if p.requires_grad)
            self._changes.agree("parameters have come in, or are trained from now on,", trained, ranks)

    def _step_begins(self, *_: Any) -> None:
        if not self._pending and self._watch.notice(self._params()) and self._moves():
            # Gradients that came without a backward, or only with ones inside of no_sync().
            if self._scale.used:
                what = "a GradScaler has seen gradients before their average; leave the last backward out of no_sync()"
                raise GradweaveError(what)
            self._backward_ended()
        self._stepping = True

    def _moves(self) -> bool:
        """Whether the step that begins changes weights; those that only create an optimizer's state do not."""
        return any(float(group.get("lr", 1.0)) != 0 for group in self._optimizer.param_groups)

    def _step_ended(self, *_: Any) -> None:
        self._stepping = False
        self._watch.remember(self._weights.tensors)
        if self._pending:
            self._tick()

    def _tick(self) -> None:
        """The end of a training step."""
        self._pending = False
        self._exchange.record.stepped()
        with self._leaving_a_checkpoint():
            step = self._steps
            involved = self._exchange.involves_mates(step)
            if self._mates.uneven and involved:
                self._mates.gather(Call.TICK, step, self._no_flags(), [], active=True)
            if self._replicas is not None and involved and not self._averages:
                # Only here is it known that all ranks of the node come.
                self._replicas.check_now_and_then()
            self._steps += 1
            self._exchange.perform(step)

    def _no_flags(self) -> list[int]:
        return [0] * len(self._params())

    def no_update(self) -> AbstractContextManager[None]:
        """Return a context for micro-batches: backwards inside neither average gradients nor count as steps."""
        return self._watch.paused()

    # What the user may say, and ask.

    def observe(self, loss: torch.Tensor) -> None:
        """Tells the loss of a batch, for ``pace="plateau"``; each exchange looks at the mean since the last."""
        if not self._exchange.alone:
            self._losses.add(loss)

    def epoch_end(self, loss: torch.Tensor | float | None = None) -> None:
        """Tells that an epoch has ended, and its mean loss on this rank; in paper mode all ranks must call it."""
        if loss is not None:
            self._losses.epoch = float(loss)
        if self._options.mode == "paper":
            if self._pending:
                self._tick()
            with self._leaving_a_checkpoint():
                if not self._mates.alone:
                    loss_sum = torch.tensor([self._losses.epoch], dtype=torch.float64)
                    self._mates.sum_up_numbers(loss_sum, self._steps)
                    self._losses.epoch = float(loss_sum) / self._topology.places
                self._exchange.border(self._steps)
        self._exchange.record.paused()

    @property
    def steps(self) -> int:
        """Training steps so far."""
        return self._steps

    @property
    def rhythm(self) -> list[tuple[int, int, int]]:
        """Exchange from which on, steps between exchanges, steps until a merge: each change so far."""
        return list(self._exchange.rhythm.changes)

    def stats(self) -> dict[str, float]:
        """Bytes sent by this rank, exposed seconds, staleness, and the like: plain numbers for any logger."""
        return {"steps": self._steps, **self._exchange.record.stats(self._exchange.rhythm)}

    def timelines(self) -> tuple[Timeline, Timeline]:
        """What the simulator makes of the measured times, and what was measured, on a rank that has exchanged."""
        topology = self._topology
        return self._exchange.record.timelines(self._exchange.rhythm, topology.nodes, topology.places)

    def save_timeline(self, path: str | Path) -> None:
        """Draws :meth:`timelines` one above the other, as a picture or a trace."""
        save_timelines(self.timelines(), path)

    # The end, and checkpoints.

    def finish(self) -> None:
        """Waits for all that is under way and leaves all ranks with the same weights; all must call it."""
        if self._detached:
            return
        with self._leaving_a_checkpoint():
            if self._pending:
                self._tick()
            self._wait_for_mates()
            self._wait_for_nodes()
            self._leave()
        self.detach()

    def _leave(self) -> None:
        """Does not let the store's host go before all others have read the last verdict."""
        if self._exchange.alone:
            return
        ranks = len(self._agreement.alive) * self._topology.places
        call = partial(self._agreement.leave, ranks, host=self._topology.rank == 0)
        with suppress(LostPeerError):
            self._agreement.ask(call, name="gradweave leave").answer()

    def _wait_for_mates(self) -> None:
        """Stands by, without gradients of its own, until no rank of the node has batches left."""
        while self._averages and not self._mates.alone:
            vectors = self._weights.zeros()
            met = self._mates.gather(Call.LEAVE, self._steps, self._no_flags(), vectors, active=False)
            if met.call is Call.LEAVE:
                break
            self._compare()
            self._steps = met.step
            if met.call is Call.TICK:
                self._exchange.perform(met.step)
                self._steps += 1
            elif self._exchange.averages_gradients(met.step):
                self._averaging.across(vectors, met.flags, len(met.active), met.step)
        if self._mates.uneven:
            self._take_from(self._mates.active[0])
        self._mates.active = tuple(range(self._topology.places))

    def _take_from(self, place: int) -> None:
        """Gives the whole node what the rank has that trained longest."""
        step = self._mates.give(self._steps, place, self._steps)
        for layout in (Layout(self._params()), Layout(self._model.buffers())):
            vectors = layout.pack()
            self._mates.share(vectors, place, step)
            layout.store(vectors)
        given = self._mates.give((self._optimizer.state_dict(), self._exchange.state()), place, step)
        self._optimizer.load_state_dict(given[0])
        self._exchange.take(given[1])
        self._steps = step

    def _wait_for_nodes(self) -> None:
        """Takes part in the steps of nodes that still train, without any of its own."""
        exchange = self._exchange
        if exchange.alone:
            self._exchange.same_statistics(self._steps)
        exchange.done, exchange.trained = True, self._steps
        while not (exchange.alone or exchange.all_done):
            if exchange.averages_gradients(self._steps):
                vectors = self._weights.zeros()
                sums = exchange.average(vectors, [0.0, *self._no_flags()], self._steps)
                if sums is not None and sums[0]:
                    exchange.behind()
            self._steps = exchange.next_event(self._steps)
            exchange.perform(self._steps)
            self._steps += 1
        exchange.settle(self._steps, final=True)
        self._steps = exchange.trained

    @property
    def is_attached(self) -> bool:
        """Whether it has been neither detached nor finished."""
        return not self._detached

    def explain(self) -> str:
        """Return what is done, and why."""
        if self._detached:
            return "detached: this rank trains by itself"
        where = f"{self._topology.nodes} node(s) of {self._topology.places} rank(s)"
        inside = "gradients are averaged inside the node" if self._averages else "a wrapper averages inside the node"
        if self._exchange.alone:
            return f"{where}: {inside}, and there is no other node to exchange weights with"
        return f"{where}: {inside}; mode={self._options.mode!r}: {self._exchange.describe(self._steps)}"

    def detach(self) -> None:
        """Lets go at once: what is under way is dropped, and each node keeps its weights."""
        if self._detached:
            return
        self._detached = True
        self._undo.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()
        else:
            self.detach()

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on exactly here, on this rank, with an exchange under way or not.

        Save it on every rank, together with the model's and the optimizer's.
        """
        if self._pending and self._watch.cleared:
            self._tick()
        return self._state()

    def _state(self) -> dict[str, Any]:
        state = checkpoint.save(self._exchange, self._topology, self._params(), self._weights)
        return {**state, "steps": self._steps, "pending": self._pending}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where a checkpoint was taken; all ranks must call it, behind loading model and optimizer.

        If each rank loads its own on the nodes it was taken on, training goes on bit for bit. On other
        nodes it goes on with what the first rank has loaded.
        """
        fits = checkpoint.fits(state, self._topology, self._groups)
        self._steps, self._pending = state["steps"], state["pending"]
        self._agreement.use(self._stores())
        if fits:
            checkpoint.check_weights(state, self._params())
            checkpoint.load(self._exchange, state, self._params(), self._weights)
            self._exchange.drop_failed(self._steps)
            return
        what = "checkpoints of other nodes, or of different steps: all ranks go on with what the first one has loaded"
        announce(what, level=logging.WARNING)
        checkpoint.merge_alone(self._exchange, state, self._params(), self._weights)
        if self._groups.everyone is not None:
            box: list[Any] = [(self._optimizer.state_dict(), self._exchange.state(), self._steps, self._pending)]
            dist.broadcast_object_list(box, self._topology.ranks[0][0], group=self._groups.everyone)
            optimizer, exchange, self._steps, self._pending = box[0]
            if not self._is_first:
                self._optimizer.load_state_dict(optimizer)
            self._exchange.take(exchange)
        self._exchange.next_send = self._steps
        self.share_from_first_rank()

    def _leaving_a_checkpoint(self) -> AbstractContextManager[None]:
        def states() -> dict[str, Any]:
            self._exchange.flight = None
            return {
                "model": self._model.state_dict(), "optimizer": self._optimizer.state_dict(), "daso": self._state(),
            }  # fmt: skip

        path = self._options.checkpoint_dir / f"rank{self._topology.rank}.pt"
        return leaving_a_checkpoint(path, states, self.detach)


def _is_running(name: str) -> bool:
    return name.rpartition(".")[2].startswith("running_")
