"""``compile()``: a training step as one function."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import update_wrapper
from inspect import unwrap
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from gradweave._compat.autograd import parameters_behind, saved_tensors_are_hooked
from gradweave._compat.functions import flat_leaves, map_nested
from gradweave._compat.modules import hooks_of_all
from gradweave._compat.optimizers import mark_stepped, step_pre_hooks
from gradweave._compat.tracing import dynamo_compile
from gradweave._logging import announce, report
from gradweave._runtime.attachment import AccumulatingAttachment
from gradweave._runtime.claims import Technique, claim_model, claim_optimizer
from gradweave._runtime.peers.meshes import group_of
from gradweave._runtime.peers.replica_messages import naming_lost_peers
from gradweave._runtime.peers.same_on_ranks import (
    describe_buffers,
    describe_layouts,
    describe_optimizer,
    describe_parameters,
    same_on_ranks,
)
from gradweave._runtime.requirements import refuse_sharded
from gradweave._runtime.wrapped_optimizers import without_wrapper
from gradweave.compiler.captured_parts import CapturedParts, Parts, let_go, objective_of
from gradweave.compiler.checks import (
    Lowering,
    NewShapes,
    announce_unaveraged,
    check_loss_fn,
    check_options,
    check_replica,
    check_scaler,
    check_step,
)
from gradweave.compiler.eager_fallback import EagerFallback, reason_of
from gradweave.compiler.gradients import Clipping
from gradweave.compiler.lanes import Clock, timeline_of
from gradweave.compiler.left_work import LeftWork
from gradweave.compiler.padding import pad_batch
from gradweave.compiler.planning import DECIDED_BY_COSTS, StepPolicy, best_held_back, may_leave_work
from gradweave.compiler.program import StepOptions
from gradweave.compiler.replica_group import ReplicaGroup, named_replicas
from gradweave.compiler.step_state import CallState, StepState
from gradweave.errors import ArgumentError, GradweaveError, UnsupportedError
from gradweave.profile.cache import cached_costs
from gradweave.profile.measure import measure_costs
from gradweave.schedule.costs import Costs
from gradweave.schedule.links import Link
from gradweave.schedule.schedule import Schedule
from gradweave.schedule.timeline import Timeline
from gradweave.step_graph.errors import HookError, NoStateError, NotOneGraphError, RefusedError
from gradweave.step_graph.objective import on_device_of
from gradweave.step_graph.recording import Mark

Batch = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a call of a step, by position and by name."""


def compile(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    optimizer: Optimizer,
    *,
    mesh: DeviceMesh | ProcessGroup | None = None,
    reduce_dtype: torch.dtype | None = None,
    max_grad_norm: float | None = None,
    max_grad_value: float | None = None,
    scaler: GradScaler | None = None,
    memory_budget: float | None = None,
    policy: StepPolicy = "auto",
    costs: Costs | None = None,
    lower: Lowering = "inductor",
    new_shapes: NewShapes = "compile",
    variants: int = 8,
) -> Step:
    """Make one graph of a whole training step: forward, backward, clipping and update.

    ``loss = step(*batch)`` then does what these lines did::

        loss = loss_fn(model, *batch)
        loss.backward()
        clip_grad_norm_(parameters_of(optimizer), max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()

    The model, the optimizer and schedulers on it are used as usual: weights and state are current between steps, and
    changes to them and to hyperparameters take effect in the next one. The first step runs eagerly and creates the
    optimizer's state.

    Args:
        model: Any model; one that ``torch.compile(fullgraph=True)`` does not take runs eagerly.
        loss_fn: Called as ``loss_fn(model, *batch)``; returns the loss, or a tuple of the loss and anything else that
            the step is to return with it.
        optimizer: Any optimizer; one whose step is no tensor code, as that of nearly all of ``torch.optim`` is, runs
            eagerly.
        mesh: The ranks that train replicas of the model, a mesh of one dimension or a process group: gradients are
            averaged over them, inside of the graph, as DistributedDataParallel does. The model is given to all ranks
            unwrapped; the first rank's weights and buffers become everyone's. None averages nothing.
        reduce_dtype: Dtype in which gradients travel between the ranks of the mesh, such as ``torch.bfloat16``, which
            halves what float32 sends; None for their own.
        max_grad_norm: Clips gradients to this common norm; :attr:`Step.grad_norm` is the norm before.
        max_grad_value: Clips each element of a gradient to this value.
        scaler: Scales the loss and skips updates whose gradients are not finite, inside the graph; do not call its
            ``step()`` and ``update()``.
        memory_budget: Share of the activations that may be kept for backward, 0 to 1; the others are recomputed there.
            1, and None, is what ``torch.compile`` does; with ``lower="replay"``, None keeps all but those of
            ``torch.utils.checkpoint``.
        policy: Order and streams of the step's tasks: the name of one of :data:`gradweave.schedule.POLICIES` for one
            device, or a Schedule. One that the step's dependencies do not allow is refused. Where it lets work run in
            the next step, any look at a weight does that work first; so does :meth:`Step.flush`. ``"auto"`` leaves the
            order to the compiler, but for ``costs``.
        costs: Of :func:`gradweave.profile.measure_costs`, by which ``"joint"``, ``"cross_step"`` and ``"side_region"``
            are planned; if there are none, these policies measure them in the second step, and keep them on disk. With
            ``"auto"``, weight gradients and updates of the upper layers run on a second stream where a schedule planned
            from the costs says that it pays; not with clipping by norm, which needs all gradients first.
        lower: ``"inductor"`` compiles the graph and, on a GPU, replays it as one CUDA graph; ``"replay"`` runs the
            traced operations as they are, bit for bit the eager step.
        new_shapes: Treatment of a batch of another shape, such as a short last one: ``"compile"`` makes one more graph,
            ``"eager"`` runs that step without one, ``"pad"`` pads it to the first shape, floats with 0 and targets of
            ``cross_entropy`` with the index that it ignores; a batch with other integers, such as token ids, runs
            eagerly.
        variants: Number of graphs to keep, for shapes of batches and modes of the model; a step that needs one more
            runs eagerly.

    Returns:
        The step, to be called with a batch.
    """
    optimizer = without_wrapper(optimizer)
    if scaler is not None and isinstance(scaler, GradScaler) and not scaler.is_enabled():
        scaler = None
    group = group_of(mesh, "mesh")
    with same_on_ranks(group, technique="compile", alone=group is None) as facts:
        check_options(
            max_grad_norm=max_grad_norm,
            max_grad_value=max_grad_value,
            scaler=scaler,
            memory_budget=memory_budget,
            costs=costs,
            policy=policy,
            lower=lower,
            new_shapes=new_shapes,
            variants=variants,
            averages=group is not None,
            reduce_dtype=reduce_dtype,
        )
        check_step(model, optimizer)
        check_loss_fn(loss_fn)
        check_scaler(scaler, optimizer)
        if group is not None:
            check_replica(model, optimizer)
            scale = None if scaler is None else scaler.get_scale()
            facts["the options"] = str(
                (max_grad_norm, max_grad_value, scale, memory_budget, lower, reduce_dtype, policy)
            )
            facts |= describe_optimizer(optimizer)
            facts |= describe_parameters(named_replicas(model, optimizer))
            facts |= describe_layouts(named_replicas(model, optimizer))
            facts |= describe_buffers(model.named_buffers())
    clipping = Clipping(max_grad_norm, max_grad_value)
    replicas = None
    if group is not None:
        depend = max_grad_norm is not None or scaler is not None
        replicas = ReplicaGroup(model, optimizer, group, dtype=reduce_dtype, updates_depend=depend)
    if mesh is None:
        announce_unaveraged()
    options = StepOptions(
        clipping, lower, scaler, memory_budget, policy, capture=True,
        report=lambda doing: report(f"compile: {doing}"), replicas=replicas,
    )  # fmt: skip
    return Step(model, loss_fn, optimizer, options, costs=costs, new_shapes=new_shapes, variants=variants)


class Step(AccumulatingAttachment):
    """A compiled training step, as :func:`compile` returns it; call it with a batch.

    A call takes one of three ways: eagerly, while parameters have no optimizer state yet; eagerly, if something is in
    the way of a graph, now or since the last try (:class:`EagerFallback`); as one graph, whose progress through the
    call is a :class:`CallState`. A graph is made within the call that needs it: Dynamo captures the objective, or finds
    what it has captured for these shapes, and the captured :class:`Program` traces and lowers the rest.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any],
        optimizer: Optimizer,
        options: StepOptions,
        *,
        costs: Costs | None = None,
        new_shapes: NewShapes,
        variants: int,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self._state = StepState(optimizer)
        self._state.costs = costs
        if may_leave_work(options.policy):
            self._state.left = LeftWork(model, optimizer)
        parts = Parts(model, loss_fn, optimizer, self._state, options)
        captured = CapturedParts(parts)
        self._eager_objective = objective_of(captured)
        self._options = options
        self._replicas = options.replicas
        self._new_shapes = new_shapes
        self._variants = variants
        self._first_shapes: Any = None
        self._updated: set[int] = set()
        self._fallback = EagerFallback(variants)
        self._eager_reason: str | None = None
        self._known_step: Any = None
        self._forwards = parts.forwards
        self._objective, self._forget = dynamo_compile(
            objective_of(captured), captured.add_program, variants, exact=options.lower == "replay"
        )
        self._captured = captured
        self._claims = ExitStack()
        claim_model(model, Technique.COMPILE, self, self._claims)
        claim_optimizer(optimizer, Technique.COMPILE, self, self._claims)
        # Runs once: in detach(), or when the step is dropped without it.
        if options.replicas is not None:
            self._claims.callback(options.replicas.close)
        if self._state.left is not None:
            self._claims.callback(self._state.left.detach)
            if options.replicas is not None:
                options.replicas.settle_by(self._state.left.flush)
        self._let_go = weakref.finalize(self, let_go, captured, self._forget, self._claims)

    def __call__(self, *batch: Any, **named: Any) -> Any:
        """Take a step, as one graph if possible, and otherwise eagerly, with one warning.

        Args:
            batch: Arguments of ``loss_fn`` after the model.
            named: Arguments of ``loss_fn`` by name.

        Returns:
            The loss, or the loss and what ``loss_fn`` returned with it; the tensors are the caller's.
        """
        if not self.is_attached:
            raise GradweaveError("this step is detached; compile() the model again")
        if not torch.is_grad_enabled():
            raise GradweaveError("step() under no_grad() or inference_mode(): training needs gradients; leave it")
        if self._state.left is None:
            return self._take_among_ranks(batch, named)
        with self._state.left.step():
            return self._take_among_ranks(batch, named)

    def _take_among_ranks(self, batch: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Take a step, with what the ranks do before it."""
        if self._replicas is None:
            return self._take(batch, named)
        with naming_lost_peers("a step could not be taken"):
            self._replicas.begin_step(update=self._state.update)
            try:
                return self._take(batch, named)
            except BaseException:
                self._replicas.step_failed()
                raise

    def _take(self, batch: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Take a step, in the way that fits."""
        given: Batch = on_device_of(self.model, (batch, named))
        params = [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]
        leaves = flat_leaves(given)
        shapes = _shapes(leaves)
        if not self._updated.issuperset(map(id, params)):
            return self._first_step(given, params, shapes)
        if self._replicas is not None and self._replicas.is_learning:
            return self._learning_step(given, params)
        obstacle = self._obstacle(leaves)
        if obstacle is not None:
            return self._step_without_graph(obstacle, given, params)
        if self._new_shapes == "eager" and shapes != self._first_shapes:
            announce(f"compile: a batch of shapes {shapes} runs eagerly")
            return self._eager_step(given, params)
        values = self._state.padding_values  # known once there is a graph, so the first one is made without padding
        if self._new_shapes == "pad" and shapes != self._first_shapes and values is not None:
            try:
                given = pad_batch(given, leaves, self._first_shapes, values)
            except NotOneGraphError as error:
                return self._step_without_graph(str(error), given, params)
            announce(f"compile: a batch of shapes {shapes} is padded to {self._first_shapes}")
            leaves, shapes = flat_leaves(given), self._first_shapes
        return self._graph_step(given, leaves, params, shapes)

    def _first_step(self, given: Batch, params: Sequence[nn.Parameter], shapes: Any) -> Any:
        """Take a step eagerly, in which the optimizer creates the state of its parameters."""
        if not self._updated:
            refuse_sharded(self.model)  # FSDP may have come after compile(): a step would go past its wrapper
            announce("compile: the first step runs eagerly; it creates the optimizer's state")
        result = self._learning_step(given, params)
        if self._first_shapes is None:
            self._first_shapes = shapes
        return result

    def _learning_step(self, given: Batch, params: Sequence[nn.Parameter]) -> Any:
        """Take a step eagerly, which shows all ranks which parameters have gradients; then agree on the messages."""
        replicas = self._replicas
        is_to_hold = replicas is not None and replicas.is_learning and self._options.policy == "reverse_first_k"
        result = self._eager_step(given, params)
        if is_to_hold and replicas is not None and not replicas.is_learning:
            # On all ranks, since a loss may have collectives of its own; the first one's decide.
            costs = self._measure_costs(given, measure_costs)

            def count(link: Link) -> int:
                return best_held_back(costs, link, replicas.size)

            replicas.hold_back(count)
        return result

    def _graph_step(
        self, given: Batch, leaves: Sequence[Any], params: Sequence[nn.Parameter], shapes: Sequence[Any]
    ) -> Any:
        """Take a step as one graph; eagerly if there can be none."""
        state = self._state
        kind = (shapes, self.model.training)
        if state.mark is None and self._fallback.count_down(kind):
            return self._eager_step(given, params)
        # Dynamo guards the forwards of a user's classes, but not of torch's own: one that was patched would go unseen.
        if any(module_class.forward is not forward for module_class, forward in self._forwards.items()):
            self._forget()
            self._forwards.clear()
        arguments, named = given
        if self._options.policy in DECIDED_BY_COSTS and state.costs is None:
            state.costs, state.are_costs_ours = self._measure_costs(given, cached_costs), True
        state.call, state.batch = CallState.PENDING, leaves
        try:
            loss, extras = self._objective(*arguments, **named)
        except NoStateError:
            return self._eager_step(given, params)
        except (ArgumentError, UnsupportedError, RefusedError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # any, of torch's compilers
            if state.call is not CallState.PENDING:
                raise
            if state.mark is not None:
                raise GradweaveError(
                    f"a step that is recorded must be a graph: {reason_of(error, self._variants)}"
                ) from error
            if not isinstance(error, HookError):
                self._fallback.note_failure(kind)
            return self._step_without_graph(reason_of(error, self._variants), given, params)
        finally:
            state.batch = ()
        if state.call is CallState.PENDING:  # Dynamo is switched off, and Python has run the objective
            return self._eager_step_from(loss, extras, params)
        self._fallback.note_success(kind)
        self._eager_reason = None
        if state.call is CallState.UPDATE_LEFT:
            self._eager_update(params)
        elif state.call is CallState.UPDATED:
            mark_stepped(self.optimizer)
            if self._replicas is not None and state.signals is not None:
                if self._replicas.hear(state.signals):
                    self.flush()
                    self._late_update()
                self._replicas.end_step()
        return loss if extras is None else (loss, extras)

    def _measure_costs(self, given: Batch, measure: Callable[..., Costs]) -> Costs:
        """Measure the costs of a step's tasks, or read those that were measured on this machine before."""
        arguments, named = given
        tell, loss_fn = self._options.report, self._captured.open().loss_fn

        def objective(model: nn.Module, *batch: Any) -> Any:
            return loss_fn(model, *batch[: len(arguments)], **dict(zip(named, batch[len(arguments) :], strict=True)))

        # Costs are kept under the name of what is measured.
        update_wrapper(objective, loss_fn)
        try:
            return measure(
                self.model, objective, self.optimizer, [*arguments, *named.values()],
                progress=lambda doing, done: tell(f"measuring the costs of tasks: {doing} ({done:.0%})"),
            )  # fmt: skip
        except GradweaveError as error:
            policy = getattr(self._options.policy, "policy", self._options.policy)
            raise UnsupportedError(
                f"policy={policy!r}", f"the costs that it is planned by cannot be measured: {error}", "give costs="
            ) from error

    def _step_without_graph(self, reason: str, given: Batch, params: Sequence[nn.Parameter]) -> Any:
        """Take a step eagerly and then tell the user why, so that an error of the step itself comes first."""
        result = self._eager_step(given, params)
        self._fallback.warn(reason)
        self._eager_reason = reason
        return result

    def _obstacle(self, leaves: Sequence[Any]) -> str | None:
        """Return the reason why a graph would do something else than an eager step; None if there is none."""
        if any(map(_wants_gradient, leaves)):
            return "a tensor of the batch requires a gradient"
        if step_pre_hooks(self.optimizer):
            return "the optimizer has step hooks, which see gradients"
        if hooks_of_all():
            return "there are hooks on all modules, or on all optimizers"
        if saved_tensors_are_hooked():
            return "there are hooks on what autograd saves"
        step = vars(self.optimizer).get("step")
        if step is not None and step is not self._known_step:
            # Schedulers replace step() by a wrapper of it, which is no obstacle.
            if unwrap(step) is not unwrap(type(self.optimizer).step):
                return "the optimizer's step() was replaced"
            self._known_step = step
        return None

    @property
    def eager_reason(self) -> str | None:
        """The reason why the last step that could not be a graph could not; None if a graph has run since."""
        return self._eager_reason

    def __deepcopy__(self, _: Any) -> Step:
        raise GradweaveError("a compiled step cannot be copied; copy the model and the optimizer, and compile() them")

    def __reduce__(self) -> Any:
        raise GradweaveError("a compiled step cannot be saved; save the state dicts of the model and the optimizer")

    @property
    def is_attached(self) -> bool:
        """Whether the attachment is in force."""
        return self._let_go.alive

    def detach(self) -> None:
        """Drop the graphs and their memory; the model and the optimizer stay as they are."""
        self._let_go()

    def explain(self) -> str:
        """Return how steps are taken, and why."""
        if not self.is_attached:
            return "detached: there is no graph any more"
        graphs = len(self._captured.open().programs)
        eager = f"; the last step that could not be one ran eagerly: {self._eager_reason}" if self._eager_reason else ""
        averages = f"; {self._replicas.explain()}" if self._replicas is not None else ""
        if self._state.schedule is not None:
            schedule = self._state.schedule
            averages += f"; by policy {schedule.policy!r} on {', '.join(lane.name for lane in schedule.lanes)}"
        return f"lower={self._options.lower!r}: {graphs} graph(s) so far{averages}{eager}"

    def flush(self) -> None:
        """Do now what the last step has left to the next one; any look at a weight does it too."""
        if self._state.left is not None:
            self._state.left.flush()

    @property
    def schedule(self) -> Schedule | None:
        """The schedule of the last step that was a graph; None if there was none, or its compiler chose the order."""
        return self._state.schedule

    def timeline(self, *batch: Any, **named: Any) -> Timeline:
        """Take a step like any other, and return what ran when, on the lanes of :attr:`schedule`.

        Each task, or with Inductor each region of tasks that it compiles as one, runs by itself, which is slower. The
        first two steps of a shape have no schedule yet, and cannot be measured.

        Args:
            batch: Arguments of ``loss_fn`` after the model.
            named: Arguments of ``loss_fn`` by name.
        """
        clock = self._state.clock = Clock(next(self.model.parameters()).device)
        try:
            self(*batch, **named)
        finally:
            self._state.clock = None
        if not clock.runs:
            raise GradweaveError(
                "this step ran without a schedule, and was not measured: give policy= to compile(), and take two steps "
                f"of this shape first{f' ({self._eager_reason})' if self._eager_reason else ''}"
            )
        return timeline_of(clock)

    @contextmanager
    def no_update(self) -> Iterator[None]:
        """Return a context in which steps only add up gradients, in ``.grad``: for all micro-batches but the last."""
        before, self._state.update = self._state.update, False
        try:
            yield
        finally:
            self._state.update = before

    def record(self, mark: Mark | None) -> None:
        """Let steps run one operation at a time, each task of a layer in a context of its own.

        These are training steps like the others, only slower: for profiles and pictures.

        Args:
            mark: Called with the kind of task and the layer; None to go back to compiled steps.
        """
        self._state.mark = mark

    @property
    def recorded_layers(self) -> tuple[str, ...]:
        """The names of the modules that are the layers of the last recorded step, by their number."""
        return self._state.layers

    @property
    def grad_norm(self) -> torch.Tensor:
        """The norm of all gradients of the last step, before it was clipped."""
        if self._state.norm is None:
            raise GradweaveError("no norm was computed: give max_grad_norm to compile(), and take a step")
        return self._state.norm

    def _eager_step(self, given: Batch, params: Sequence[nn.Parameter]) -> Any:
        self.flush()
        arguments, named = given
        return self._eager_step_from(*self._eager_objective(*arguments, **named), params)

    def _eager_step_from(self, loss: torch.Tensor, extras: Any, params: Sequence[nn.Parameter]) -> Any:
        """Finish an eager step after forward; only the optimizer's parameters get a gradient, as in a graph."""
        scaler = self._options.scaler
        own = set(map(id, params))
        # Parameters behind the loss are also those of other models that loss_fn calls.
        found = [*self.model.parameters(), *parameters_behind(loss)]
        others = {p: p.grad for p in found if p.requires_grad and id(p) not in own}
        for p in others:
            p.grad = None
        try:
            (loss if scaler is None else scaler.scale(loss)).backward()
        finally:
            for p, grad in others.items():
                p.grad = grad
        detached = map_nested(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, extras)
        result = loss.detach() if extras is None else (loss.detach(), detached)
        if self._state.update:
            self._eager_update(params)
        return result

    def _eager_update(self, params: Sequence[nn.Parameter]) -> None:
        """Average and clip the gradients that are there, and update."""
        scaler = self._options.scaler
        if self._replicas is not None:
            self._replicas.average()
        if scaler is not None:
            scaler.unscale_(self.optimizer)
        clipping = self._options.clipping
        if clipping.max_norm is not None:
            self._state.norm = nn.utils.clip_grad_norm_(params, clipping.max_norm)
        if clipping.max_value is not None:
            nn.utils.clip_grad_value_(params, clipping.max_value)
        # A scaler skips the optimizer's step if a gradient is not finite: only a hook knows whether state was created.
        hook = self.optimizer.register_step_post_hook(lambda *_: self._updated.update(map(id, params)))
        try:
            if scaler is None:
                self.optimizer.step()
            else:
                scaler.step(self.optimizer)
                scaler.update()
        finally:
            hook.remove()
        self.optimizer.zero_grad()
        if self._replicas is not None:
            self._replicas.end_step()

    def _late_update(self) -> None:
        """Update the parameters that other ranks have sent gradients of, behind the update of all others."""
        if self._options.clipping.max_value is not None:
            params = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
            nn.utils.clip_grad_value_(params, self._options.clipping.max_value)
        self.optimizer.step()
        self.optimizer.zero_grad()


def _shapes(leaves: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(value.shape if isinstance(value, torch.Tensor) else None for value in leaves)


def _wants_gradient(value: Any) -> bool:
    """Return whether a value in a batch needs a gradient, or passes one on; weights in a batch are weights."""
    return isinstance(value, torch.Tensor) and value.requires_grad and not isinstance(value, nn.Parameter)
