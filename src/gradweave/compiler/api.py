"""``compile()``: a training step as one function."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from inspect import unwrap
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.fx import GraphModule
from torch.optim import Optimizer

from gradweave._compat.eager import (
    flat_leaves,
    hooks_of_all,
    map_nested,
    mark_stepped,
    parameters_behind,
    saved_tensors_are_hooked,
    step_pre_hooks,
)
from gradweave._compat.tracing import dynamo_compile
from gradweave._logging import announce, report
from gradweave._runtime.claims import Technique, claim_optimizer
from gradweave._runtime.wrapped_optimizers import without_wrapper
from gradweave.compiler.checks import check_loss_fn, check_options, check_step
from gradweave.compiler.eager_fallback import EagerSteps, reason_of
from gradweave.compiler.padding import padded
from gradweave.compiler.program import Program, StepOptions
from gradweave.compiler.shared_state import SharedState
from gradweave.compiler.trace import Clipping
from gradweave.errors import ArgumentError, GradweaveError
from gradweave.schedule.costs import Costs
from gradweave.step_graph.errors import HookError, NoStateError, NotOneGraphError, RefusedError
from gradweave.step_graph.objective import loss_and_extras, mark_loss, on_device_of
from gradweave.step_graph.recording import Mark

Batch = tuple[tuple[Any, ...], dict[str, Any]]
"""What a step is called with: arguments, and those with names."""


def compile(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    optimizer: Optimizer,
    *,
    max_grad_norm: float | None = None,
    max_grad_value: float | None = None,
    scaler: GradScaler | None = None,
    memory_budget: float | None = None,
    costs: Costs | None = None,
    lower: str = "inductor",
    new_shapes: str = "compile",
    variants: int = 8,
) -> Step:
    """Makes one graph of a whole training step: forward, backward, clipping and update.

    ``loss = step(*batch)`` then does what these lines did::

        loss = loss_fn(model, *batch)
        loss.backward()
        clip_grad_norm_(parameters_of(optimizer), max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()

    The model, the optimizer and schedulers on it are used as ever: weights and state are current
    between steps, changes to them and to hyperparameters take effect in the next. The first step
    runs eagerly and creates the optimizer's state.

    Args:
        model: Any model; what ``torch.compile(fullgraph=True)`` does not take runs eagerly.
        loss_fn: Called as ``loss_fn(model, *batch)``; returns the loss, or a tuple of the loss and
            anything else that the step is to return with it.
        optimizer: Whose step is tensor code, as that of nearly all of ``torch.optim`` is; what cannot be traced
            runs eagerly.
        max_grad_norm: Clip gradients to this common norm; :attr:`Step.grad_norm` has what it was.
        max_grad_value: Clip each element of a gradient to this value.
        scaler: Scales the loss and leaves updates out whose gradients are not finite, inside the
            graph; its ``step()`` and ``update()`` are not to be called.
        memory_budget: Share of the activations that may be kept for backward, 0 to 1; the others are
            computed anew there. 1, and None, is what ``torch.compile`` does; with ``lower="replay"``,
            None keeps all but those of ``torch.utils.checkpoint``.
        costs: As :func:`gradweave.profile.measure_costs` gives them. Weight gradients and updates of the upper layers
            then run on a second stream, beside the backward of the lower ones, where a schedule planned from the
            costs says that it pays; not with clipping by norm, which needs all gradients first.
        lower: ``"inductor"`` compiles the graph and, on a GPU, replays it as one CUDA graph;
            ``"replay"`` runs the traced operations as they are, bit for bit the eager step.
        new_shapes: What a batch of another shape means, such as a short last one: ``"compile"``
            makes one more graph, ``"eager"`` runs that step without one, ``"pad"`` fills it up to
            the first shape, floats with 0 and targets of ``cross_entropy`` with what that leaves out;
            a batch with other integers, such as token ids, runs eagerly.
        variants: How many graphs to keep, for shapes of batches and modes of the model; what needs one more
            runs eagerly.

    Returns:
        The step, to be called with a batch.
    """
    check_options(
        max_grad_norm=max_grad_norm,
        max_grad_value=max_grad_value,
        scaler=scaler,
        memory_budget=memory_budget,
        costs=costs,
        lower=lower,
        new_shapes=new_shapes,
        variants=variants,
    )
    optimizer = without_wrapper(optimizer)
    check_step(model, optimizer)
    check_loss_fn(loss_fn)
    clipping = Clipping(max_grad_norm, max_grad_value)
    if scaler is not None and not scaler.is_enabled():
        scaler = None
    if scaler is not None and getattr(optimizer, "needs_loss_scale", False):
        raise ArgumentError(
            "scaler", "GradScaler", f"would scale what {type(optimizer).__name__} measures in backward; use bfloat16"
        )
    options = StepOptions(
        clipping, lower, scaler, memory_budget, costs, capture=True, report=lambda doing: report(f"compile: {doing}")
    )
    return Step(model, loss_fn, optimizer, options, new_shapes=new_shapes, variants=variants)


class Step:
    """What :func:`compile` returns: called with a batch, it takes a training step."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any],
        optimizer: Optimizer,
        options: StepOptions,
        *,
        new_shapes: str,
        variants: int,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self._shared = SharedState(optimizer)
        job = _Job(model, loss_fn, optimizer, self._shared, options)
        self._eager = _objective(job)
        self._options = options
        self._new_shapes = new_shapes
        self._variants = variants
        self._first_shapes: Any = None
        self._stepped: set[int] = set()
        self._eager_steps = EagerSteps(variants)
        self._eager_reason: str | None = None
        self._known_step: Any = None
        self._forwards = job.forwards
        self._objective, self._forget = dynamo_compile(
            _objective(job), job.add_program, variants, exact=options.lower == "replay"
        )
        weakref.finalize(self, job.close, self._forget)
        self._claims = ExitStack()
        claim_optimizer(optimizer, Technique.COMPILE, self, self._claims)

    def __call__(self, *batch: Any, **named: Any) -> Any:
        """Takes a step, as one graph where that can be, and otherwise eagerly, with one warning.

        Args:
            batch: What ``loss_fn`` is called with after the model.
            named: The same, by name.

        Returns:
            The loss, or the loss and what ``loss_fn`` returned with it; the tensors are the caller's.
        """
        if not torch.is_grad_enabled():
            raise GradweaveError("step() under no_grad() or inference_mode(): training needs gradients; leave it")
        given: Batch = on_device_of(self.model, (batch, named))
        params = [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]
        leaves = flat_leaves(given)
        shapes = _shapes(leaves)
        if not self._stepped.issuperset(map(id, params)):
            return self._first_step(given, params, shapes)
        reason = self._in_the_way(leaves)
        if reason is not None:
            return self._without_graph(reason, given, params)
        if self._new_shapes == "eager" and shapes != self._first_shapes:
            announce(f"compile: a batch of shapes {shapes} runs eagerly")
            return self._stock_step(given, params)
        fillings = self._shared.fillings  # known of a graph, so the first one is made without padding
        if self._new_shapes == "pad" and shapes != self._first_shapes and fillings is not None:
            try:
                given = padded(given, leaves, self._first_shapes, fillings)
            except NotOneGraphError as error:
                return self._without_graph(str(error), given, params)
            announce(f"compile: a batch of shapes {shapes} is padded to {self._first_shapes}")
            leaves, shapes = flat_leaves(given), self._first_shapes
        return self._compiled_step(given, leaves, params, shapes)

    def _first_step(self, given: Batch, params: Sequence[nn.Parameter], shapes: Any) -> Any:
        """The step in which an optimizer makes the state of its parameters."""
        if not self._stepped:
            announce("compile: the first step runs eagerly; it creates the optimizer's state")
        result = self._stock_step(given, params)
        if self._first_shapes is None:
            self._first_shapes = shapes
        return result

    def _compiled_step(
        self, given: Batch, leaves: Sequence[Any], params: Sequence[nn.Parameter], shapes: Sequence[Any]
    ) -> Any:
        kind = (shapes, self.model.training)
        if self._shared.mark is None and self._eager_steps.is_due(kind):
            return self._stock_step(given, params)
        if any(kind_of.forward is not forward for kind_of, forward in self._forwards.items()):
            self._forget()  # a class was patched, which Dynamo does not look for in torch's own
            self._forwards.clear()
        arguments, named = given
        self._shared.begun, self._shared.batch = False, leaves
        try:
            loss, more = self._objective(*arguments, **named)
        except NoStateError:
            return self._stock_step(given, params)
        except (ArgumentError, RefusedError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # whatever torch's compilers raise
            if self._shared.begun:
                raise
            if self._shared.mark is not None:
                raise GradweaveError(
                    f"a step that is recorded must be a graph: {reason_of(error, self._variants)}"
                ) from error
            if not isinstance(error, HookError):
                self._eager_steps.failed(kind)
            return self._without_graph(reason_of(error, self._variants), given, params)
        finally:
            self._shared.batch = ()
        if not self._shared.begun:  # Dynamo is switched off
            return self._from_loss(loss, more, params)
        self._eager_steps.worked(kind)
        self._eager_reason = None
        if self._shared.finish_eagerly:
            self._stock_update(params)
        elif self._shared.update:
            mark_stepped(self.optimizer)
        return loss if more is None else (loss, more)

    def _without_graph(self, reason: str, given: Batch, params: Sequence[nn.Parameter]) -> Any:
        """Takes a step eagerly and tells the user why, unless it fails by itself."""
        result = self._stock_step(given, params)
        self._eager_steps.warn(reason)
        self._eager_reason = reason
        return result

    def _in_the_way(self, leaves: Sequence[Any]) -> str | None:
        """What is to be called in a step, or to see it, and would not be by a graph; None if there is nothing."""
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
            if unwrap(step) is not unwrap(type(self.optimizer).step):
                return "the optimizer's step() was replaced"
            self._known_step = step
        return None

    @property
    def eager_reason(self) -> str | None:
        """Why the last step that could be no graph could be none; None if a graph was run since."""
        return self._eager_reason

    def __deepcopy__(self, _: Any) -> Step:
        raise GradweaveError("a compiled step cannot be copied; copy the model and the optimizer, and compile() them")

    def __reduce__(self) -> Any:
        raise GradweaveError("a compiled step cannot be saved; save the state dicts of the model and the optimizer")

    @contextmanager
    def no_update(self) -> Iterator[None]:
        """Steps inside only sum up gradients, in ``.grad``: for all micro-batches of a step but the last."""
        before, self._shared.update = self._shared.update, False
        try:
            yield
        finally:
            self._shared.update = before

    def record(self, mark: Mark | None) -> None:
        """Lets steps run one operation at a time, each task of a layer in a context of its own.

        These are training steps like the others, only slower: for profiles and pictures.

        Args:
            mark: Called with the kind of task and the layer; None to go back to compiled steps.
        """
        self._shared.mark = mark

    @property
    def recorded_layers(self) -> tuple[str, ...]:
        """The names of the modules that the last recorded step had as its layers, by their number."""
        return self._shared.layers

    @property
    def grad_norm(self) -> torch.Tensor:
        """The norm of all gradients of the last step, before it was clipped."""
        if self._shared.norm is None:
            raise GradweaveError("no norm was computed: give max_grad_norm to compile(), and take a step")
        return self._shared.norm

    def _stock_step(self, given: Batch, params: Sequence[nn.Parameter]) -> Any:
        """The eager step."""
        arguments, named = given
        return self._from_loss(*self._eager(*arguments, **named), params)

    def _from_loss(self, loss: torch.Tensor, more: Any, params: Sequence[nn.Parameter]) -> Any:
        """What the eager step does after the forward; parameters that the optimizer does not have get no gradient."""
        scaler = self._options.scaler
        own = set(map(id, params))
        # Also those of other models that loss_fn calls: a graph would leave them alone.
        found = [*self.model.parameters(), *parameters_behind(loss)]
        others = {p: p.grad for p in found if p.requires_grad and id(p) not in own}
        for p in others:
            p.grad = None
        try:
            (loss if scaler is None else scaler.scale(loss)).backward()
        finally:
            for p, grad in others.items():
                p.grad = grad
        detached = map_nested(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, more)
        result = loss.detach() if more is None else (loss.detach(), detached)
        if self._shared.update:
            self._stock_update(params)
        return result

    def _stock_update(self, params: Sequence[nn.Parameter]) -> None:
        """Clips and updates with the gradients that are there."""
        scaler = self._options.scaler
        if scaler is not None:
            scaler.unscale_(self.optimizer)
        clipping = self._options.clipping
        if clipping.max_norm is not None:
            self._shared.norm = nn.utils.clip_grad_norm_(params, clipping.max_norm)
        if clipping.max_value is not None:
            nn.utils.clip_grad_value_(params, clipping.max_value)
        stepped = self.optimizer.register_step_post_hook(lambda *_: self._stepped.update(map(id, params)))
        try:
            if scaler is None:
                self.optimizer.step()
            else:
                scaler.step(self.optimizer)
                scaler.update()
        finally:
            stepped.remove()
        self.optimizer.zero_grad()


def _shapes(leaves: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(value.shape if isinstance(value, torch.Tensor) else None for value in leaves)


def _wants_gradient(value: Any) -> bool:
    """Whether something in a batch gets a gradient of its own, or hands it on; weights in a batch are weights."""
    return isinstance(value, torch.Tensor) and value.requires_grad and not isinstance(value, nn.Parameter)


class _Job:
    """What Dynamo gets to see of a step; it keeps that for good, so it can be emptied."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any],
        optimizer: Optimizer,
        shared: SharedState,
        options: StepOptions,
    ) -> None:
        self.model = model
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.shared = shared
        self.options = options
        self.programs: list[Program] = []
        self.forwards: dict[type[nn.Module], Any] = {}

    def add_program(self, forward: GraphModule, _: Any) -> Callable[..., list[Any]]:
        """The backend that Dynamo calls."""
        self.forwards.update({type(module): type(module).forward for module in self.model.modules()})
        program = Program(forward, self.model, self.optimizer, self.shared, self.options)
        self.programs.append(program)
        return program.run

    def close(self, forget: Callable[[], None]) -> None:
        """Lets go of the model and all that was compiled for it."""
        forget()
        for program in self.programs:
            program.close()
        self.__dict__.clear()


def _objective(job: _Job) -> Callable[..., tuple[torch.Tensor, Any]]:
    """The function that is captured; the operation that gives the loss is marked."""

    def objective(*batch: Any, **named: Any) -> tuple[torch.Tensor, Any]:
        loss, more = loss_and_extras(job.loss_fn(job.model, *batch, **named))
        return mark_loss(loss), more

    return objective
