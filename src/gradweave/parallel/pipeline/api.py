"""``Pipeline``: a model whose layers are on several ranks, trained by torch's pipelining runtime."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from gradweave._compat.pipelining import Runtime, make_runtime
from gradweave._runtime.attachment import AccumulatingAttachment
from gradweave._runtime.peers.meshes import group_of
from gradweave.errors import GradweaveError
from gradweave.parallel.pipeline.checks import BatchShapes, check_layers, check_model, check_parameters, device_of
from gradweave.parallel.pipeline.plan_agreement import agree
from gradweave.parallel.pipeline.planner import Plan, Settings, Split
from gradweave.parallel.pipeline.process_group import PipelinePeers
from gradweave.parallel.pipeline.programs import PipelinePolicy
from gradweave.parallel.pipeline.replicas import StageReplicas
from gradweave.parallel.pipeline.stage import ForwardAutocast, Stage, total
from gradweave.parallel.pipeline.tied import TiedGradients, find_ties
from gradweave.parallel.pipeline.weight_gradients import WeightGradientLedger
from gradweave.parallel.pipeline.whole_model import (
    OptimizerClaims,
    clip_grad_norm,
    gather_state,
    own_state,
    places_of,
)
from gradweave.schedule.costs import Costs
from gradweave.schedule.links import Link

Loss = Callable[[Any, Any], torch.Tensor]


class PipelineState(Enum):
    """State of a pipeline on this rank.

    Transitions: ``OPEN -> TRIAL -> OPEN`` while torch finds out shapes in the first step, ``OPEN -> RUNNING`` at its
    end, ``OPEN | RUNNING -> FAILED`` where this rank or another one fails, and any state ``-> CLOSED`` by
    :meth:`Pipeline.detach`. A step that all ranks refuse changes nothing.
    """

    OPEN = "open"
    """No step has run: ranks still agree on everything before they send anything."""
    TRIAL = "trial"
    """torch runs each stage once on a micro-batch, to tell the ranks what shapes to expect."""
    RUNNING = "running"
    """A step has run: shapes are fixed."""
    FAILED = "failed"
    """The process group is left; weights are those of the last optimizer step."""
    CLOSED = "closed"
    """Let go; layers, gradients and optimizers stay."""


_OVER = {
    PipelineState.FAILED: "this pipeline has stopped after an error: restart from a checkpoint, or make another one",
    PipelineState.CLOSED: "detached: this pipeline is closed, make another one",
}


class Pipeline(AccumulatingAttachment):
    """This rank's part of a model that is spread over the ranks of a group, layer by layer.

    Every rank gives the same arguments, and the same layers; each keeps those of its own stages. A step adds
    to gradients what ``loss_fn(model(x), target)``, averaged over the micro-batches, would add. As a context manager,
    it detaches at the end.

    Args:
        model: The layers, in order. Each hands a tensor, or a tuple of tensors, to the next one; their shapes do not
            change.
        loss_fn: Called as ``loss_fn(output, target)`` for each micro-batch, on the rank of the last stage.
        microbatches: Number of parts that a batch is cut into.
        policy: The schedule: ``"fast_forward"``, ``"modulo"`` and ``"memory_bounded"`` are gradweave's, ``"gpipe"``,
            ``"one_f_one_b"``, ``"interleaved"``, ``"interleaved_zero_bubble"`` and ``"zbv"`` are torch's, ``"auto"``
            simulates all of them and takes the fastest.
        group: Layers per stage where a rank has several stages; None to find out by simulation.
        max_in_flight: Most micro-batches that have entered and not left; for gradweave's schedules.
        byte_budget: Bytes that a rank may hold for micro-batches in flight, as simulated from ``costs``. Weight
            gradients that wait may never keep more than that alive.
        costs: Of each layer, from :func:`measure_layers`; those of the first rank count. Without them, layers count as
            equal.
        link: Between ranks; None measures it where costs are given.
        split: ``"fast"`` takes the two halves of backward apart in linear and convolution layers; ``"torch"``
            has torch walk the graph, for layers of other kinds.
        device: Where this rank's layers go; None leaves them where they are.
        process_group: The ranks of this pipeline; None for all.
        replicas: The ranks that have the same stages, each in a pipeline of its own on other ranks and other batches: a
            mesh of one dimension, or a process group. A step averages gradients over them. None for one pipeline.
        timeout: Seconds after which waiting for another rank is an error; None for torch's default.

    Attributes:
        module: This rank's layers, under their names in the whole model: for optimizers and checkpoints.
        plan: The schedule that was chosen, with its predicted time and bytes.
        state: Where the pipeline stands.
    """

    def __init__(
        self,
        model: nn.Sequential,
        loss_fn: Loss,
        *,
        microbatches: int,
        policy: PipelinePolicy = "modulo",
        group: int | None = None,
        max_in_flight: int | None = None,
        byte_budget: int | None = None,
        costs: Costs | None = None,
        link: Link | None = None,
        split: Split = "fast",
        device: torch.device | str | None = None,
        process_group: Any = None,
        replicas: DeviceMesh | ProcessGroup | None = None,
        timeout: float | None = None,
    ) -> None:
        self._peers = PipelinePeers(process_group, timeout)
        self.state = PipelineState.OPEN
        self._stages: list[Stage] = []
        self._runtime: Runtime | None = None
        self._claims: OptimizerClaims | None = None
        self._replicas: StageReplicas | None = None
        self._averages = True
        try:
            settings = Settings(policy, microbatches, group, max_in_flight, byte_budget, split)
            where = None if device is None else torch.device(device)
            layers, problem = _checked(model, self._peers.size)
            self.plan: Plan = agree(
                self._peers, settings, layers, costs, link,
                device=where or device_of(layers), problem=self._peers.problem or problem,
            )  # fmt: skip
            self._build(layers, loss_fn, settings, where)
            across = group_of(replicas, "replicas")
            if across is not None:
                plan = f"{self.plan.program.policy}, {self.plan.runs}"
                self._replicas = StageReplicas(self.module, across, plan=plan, timeout=timeout)
        except BaseException as error:
            self.state = PipelineState.FAILED
            self._drop_runtime()
            self._peers.leave(error)
            raise

    def _build(
        self, layers: list[tuple[str, nn.Module]], loss_fn: Loss, settings: Settings, device: torch.device | None
    ) -> None:
        program, runs, peers = self.plan.program, self.plan.runs, self._peers
        stages = program.stages_of(peers.rank)
        rank_of_layer = [program.rank_of[stage] for stage, run in enumerate(runs) for _ in run]
        own = [layers[i] for stage in stages for i in runs[stage]]
        self._layer_names = [name for name, _ in layers]
        wide = any(p.dtype is torch.float64 for _, layer in layers for p in layer.parameters())
        self._widest = torch.float64 if wide else torch.float32
        self._places = places_of(layers)
        ties = find_ties(layers, rank_of_layer)
        self.module = nn.Sequential(OrderedDict(own))
        if device is not None:
            self.module.to(device)
        self.device = check_layers(self.module, device)
        self._params = dict(self.module.named_parameters(remove_duplicate=False))
        self._tied = TiedGradients(ties, self._params, peers)
        self._autocast = ForwardAutocast(self.device)
        self._ledger = WeightGradientLedger(settings.byte_budget)
        self._loss_fn = loss_fn
        self._loss_factor = 1.0
        self._losses: list[torch.Tensor] = []
        self._steps = 0
        self._heeds_others = True
        self._shapes = BatchShapes(program.microbatches)
        self._first, self._last = 0 in stages, program.stages - 1 in stages
        self._stages = [
            Stage(
                [layers[i] for i in runs[stage]], stage, program.stages, self.device, peers.group,
                self._ledger if settings.split == "fast" else None, self._autocast,
            )
            for stage in stages
        ]  # fmt: skip
        self._claims = OptimizerClaims(
            layers, list(self.module), self._tied.own, peers, lambda: self._replicas and self._replicas.group
        )
        self._runtime = make_runtime(
            program.policy, program.ranks, self._stages, program.microbatches, self._loss, self._trial
        )

    @property
    def is_attached(self) -> bool:
        """Whether steps can be taken."""
        return self.state not in _OVER

    def explain(self) -> str:
        """Return what was planned, what it is predicted to take, and why it was chosen."""
        return _OVER.get(self.state, self.plan.explain())

    @property
    def has_first_stage(self) -> bool:
        """Whether this rank has the first stage, which needs inputs."""
        return self._first

    @property
    def has_last_stage(self) -> bool:
        """Whether this rank has the last stage, which needs targets and knows the loss."""
        return self._last

    @property
    def most_bytes_held(self) -> int:
        """The most bytes that waiting weight gradients have kept alive on this rank, besides activations."""
        return self._ledger.most_held

    def step(self, inputs: Any = None, target: Any = None, *, loss_factor: float = 1.0) -> torch.Tensor | None:
        """Run forward and backward of a batch; gradients add up until they are cleared.

        Args:
            inputs: The batch; used on the rank of the first stage.
            target: Used on the rank of the last stage.
            loss_factor: Multiplies the loss before backward, such as 1 / 4 where gradients of four steps add up to
                one.

        Returns:
            The mean loss of the micro-batches, without the factor, on the rank of the last stage; None elsewhere.
        """
        runtime = self._checked_runtime()
        self._steps += 1
        given, wanted = self._admitted(inputs, target)
        try:
            self._loss_factor = loss_factor
            if self._replicas is not None:
                self._replicas.begin_step()
            with self._tied.summed(), self._autocast.suspended():
                runtime.step(*given, target=wanted, losses=[], return_outputs=False)
            self.state = PipelineState.RUNNING
            if self._replicas is not None and self._averages:
                self._replicas.average()
            return torch.stack(self._losses).mean() if self._losses else None
        except BaseException as error:
            self._stop(error)
            raise
        finally:
            self._losses.clear()

    @contextmanager
    def no_update(self) -> Iterator[None]:
        """Return a context in which steps only add up gradients, which the first step after it averages."""
        before, self._averages = self._averages, False
        try:
            yield
        finally:
            self._averages = before

    def _admitted(self, inputs: Any, target: Any) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
        """Return what the runtime is given of a batch.

        Raises:
            GradweaveError: For a batch that cannot be trained with. If all ranks refuse it, the pipeline can go on.
        """
        given: tuple[torch.Tensor, ...] = ()
        wanted = problem = None
        try:
            if not torch.is_grad_enabled():
                raise GradweaveError(
                    "step() under no_grad() or inference_mode(): it trains; to evaluate, gather the state into the "
                    "plain model, or take a step outside of that and drop its gradients"
                )
            check_parameters(self.module)
            given = self._shapes.inputs(inputs) if self._first else ()
            wanted = self._shapes.target(target) if self._last else None
            beside = ({} if self._first else {"inputs": inputs}) | ({} if self._last else {"target": target})
            if self._heeds_others and self._shapes.is_odd(**beside):
                reason = self._peers.refusal(self._steps)
                self._heeds_others = reason is not None
                problem = None if reason is None else GradweaveError(reason)
        except GradweaveError as error:
            problem = error
        try:
            if self.state is PipelineState.OPEN:
                self._peers.refuse(problem)
            elif problem is not None and self._peers.all_refuse(self._steps, str(problem)):
                raise problem
        except GradweaveError:
            if self.state is PipelineState.OPEN:
                self._shapes = BatchShapes(self.plan.program.microbatches)
            raise
        except BaseException as error:
            self._stop(error)
            raise
        if problem is not None:
            self._stop(problem)
            raise problem
        return given, wanted

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip as ``torch.nn.utils.clip_grad_norm_`` would with the whole model; all ranks call it.

        Returns:
            The norm of all gradients of the model, before clipping.
        """
        self._checked_runtime()
        try:
            return clip_grad_norm(
                self._params, self._places, self._tied.counted_elsewhere(), self._peers,
                max_norm=max_norm, norm_type=norm_type, like=torch.empty(0, dtype=self._widest, device=self.device),
            )  # fmt: skip
        except BaseException as error:
            self._stop(error)
            raise

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the whole model's state, under the names of the whole model."""
        return self.module.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this rank's part of the whole model's state, or a state of this rank alone; all ranks call it.

        Raises:
            GradweaveError: On all ranks, if an entry is missing on one of them; nothing is loaded then.
        """
        self._checked_runtime()
        own: dict[str, Any] = {}
        problem: GradweaveError | None = None
        try:
            own = own_state(self.module, state)
        except GradweaveError as error:
            problem = error
        try:
            self._peers.refuse(problem)
            self.module.load_state_dict(own)
        except GradweaveError:
            raise
        except BaseException as error:
            self._stop(error)
            raise

    def gather_state_dict(self) -> dict[str, Any] | None:
        """Return the whole model's state, in host memory, on the first rank and None on others; all ranks call it."""
        self._checked_runtime()
        try:
            return gather_state(self.module, self._layer_names, self._peers)
        except BaseException as error:
            self._stop(error)
            raise

    def detach(self) -> None:
        """Leave the pipeline's process group; layers, gradients and optimizers stay.

        Connections are closed once all ranks have called this; where one does not within seconds, they last as
        long as the process.
        """
        self.state = PipelineState.CLOSED
        self._drop_runtime()
        if self._replicas is not None:
            self._replicas.close()
            self._replicas = None
        self._peers.close()

    def close(self) -> None:
        """Do what :meth:`detach` does."""
        self.detach()

    def _drop_runtime(self) -> None:
        """Let go of messages and of the group: connections close when nothing refers to them any more."""
        if self._claims is not None:
            self._claims.remove()
        for stage in self._stages:
            stage.group = None
        self._stages.clear()
        if self._runtime is not None:
            self._runtime.release()
            self._runtime = None

    def _checked_runtime(self) -> Runtime:
        if self._runtime is None:
            raise GradweaveError(_OVER[self.state])
        return self._runtime

    def _stop(self, error: BaseException) -> None:
        """End the pipeline: where one rank cannot go on, none can."""
        self.state = PipelineState.FAILED
        self._drop_runtime()
        self._ledger.clear()
        if self._replicas is not None:
            self._replicas.leave()
            self._replicas = None
        self._peers.leave(error)

    def _loss(self, output: Any, target: Any) -> torch.Tensor:
        """Return the loss of a micro-batch as it enters backward; in the trial run, anything that has a gradient."""
        if self.state is PipelineState.TRIAL:
            return total(output)
        with self._autocast.restored():
            loss = self._loss_fn(output, target)
        self._losses.append(loss.detach())
        if self._loss_factor != 1.0:
            loss = loss * self._loss_factor
        return loss / self.plan.program.microbatches

    @contextmanager
    def _trial(self) -> Iterator[None]:
        """Return a context in which torch's run on a first micro-batch, by which it learns shapes, leaves no trace."""
        if self.state is not PipelineState.OPEN:
            yield
            return
        self.state = PipelineState.TRIAL
        try:
            with ExitStack() as stack:
                for stage in self._stages:
                    stack.enter_context(stage.trying())
                yield
        finally:
            self.state = PipelineState.OPEN


def _checked(model: Any, ranks: int) -> tuple[list[tuple[str, nn.Module]], GradweaveError | None]:
    """Return a model's layers, or what is wrong with them, which the other ranks must hear of."""
    try:
        return check_model(model, ranks), None
    except GradweaveError as problem:
        return [], problem
