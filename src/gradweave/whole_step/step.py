"""``compile()``: a training step as one function."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.fx import GraphModule
from torch.optim import Optimizer

from gradweave.announce import announce, report
from gradweave.compat.distributed import is_distributed_tensor
from gradweave.compat.eager import flat_leaves, map_nested, mark_stepped, step_pre_hooks
from gradweave.compat.tracing import DynamoError, TooManyVariantsError, dynamo_compile
from gradweave.errors import ArgumentError, GradweaveError
from gradweave.fusion.attach import is_fused
from gradweave.marks import check_is_module, is_in_daso, is_in_data_parallel, mark_compiled
from gradweave.schedule.costs import Costs
from gradweave.split.attach import is_reordered
from gradweave.whole_step.optimizer_inputs import NoStateError
from gradweave.whole_step.packing import SharedState
from gradweave.whole_step.program import LOSS_MARK, Program, StepOptions
from gradweave.whole_step.recording import Mark
from gradweave.whole_step.trace import Clipping

LOWERINGS = ("inductor", "replay")
NEW_SHAPES = ("compile", "pad", "eager")
PADDING = -100
"""What integers are padded with: cross entropy leaves such targets out."""


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
        model: Any model that ``torch.compile(fullgraph=True)`` takes.
        loss_fn: Called as ``loss_fn(model, *batch)``; returns the loss, or a tuple of the loss and
            anything else that the step is to return with it.
        optimizer: Whose step is tensor code, as that of nearly all of ``torch.optim`` is.
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
            the first shape, floats with 0 and integers with -100, the targets that
            ``cross_entropy`` leaves out.
        variants: How many graphs to keep, for shapes of batches and modes of the model.

    Returns:
        The step, to be called with a batch.
    """
    if lower not in LOWERINGS:
        raise ArgumentError("lower", lower, f"use one of {', '.join(LOWERINGS)}")
    if new_shapes not in NEW_SHAPES:
        raise ArgumentError("new_shapes", new_shapes, f"use one of {', '.join(NEW_SHAPES)}")
    if memory_budget is not None and not 0 <= memory_budget <= 1:
        raise ArgumentError("memory_budget", memory_budget, "give a share from 0 to 1, or None")
    if costs is not None and lower == "replay":
        raise ArgumentError(
            "costs", costs.name, 'lower="replay" has one stream; use lower="inductor", or leave them out'
        )
    if variants < 1:
        raise ArgumentError("variants", variants, "give at least 1")
    for name, limit in (("max_grad_norm", max_grad_norm), ("max_grad_value", max_grad_value)):
        if limit is not None and not limit > 0:
            raise ArgumentError(name, limit, "give a positive number, or None")
    check_step(model, optimizer)
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


def check_step(model: nn.Module, optimizer: Optimizer) -> None:
    """Refuses what cannot be one graph, with the reason."""
    check_is_module(model)
    if not isinstance(optimizer, Optimizer):
        raise ArgumentError("optimizer", type(optimizer).__name__, "give a torch.optim.Optimizer")
    name = type(optimizer).__name__
    if isinstance(optimizer, (torch.optim.LBFGS, torch.optim.SparseAdam)):
        raise ArgumentError("optimizer", name, "cannot be traced; use SGD, Adam, AdamW or another of torch.optim")
    if optimizer.defaults.get("differentiable"):
        raise ArgumentError("optimizer", "differentiable=True", "construct it with differentiable=False")
    if is_in_daso(optimizer):
        raise ArgumentError(
            "optimizer", type(optimizer).__name__, "has a DASO, which a graph would run without; detach() that first"
        )
    if is_in_data_parallel(optimizer):
        raise ArgumentError(
            "optimizer",
            type(optimizer).__name__,
            "is in a DataParallel, which averages outside of a graph; detach() that",
        )
    if is_fused(model):
        raise ArgumentError("model", type(model).__name__, "is fused; detach() that first, compile() does its work")
    if is_reordered(model):
        raise ArgumentError("model", type(model).__name__, "is reordered; detach() that first")
    if step_pre_hooks(optimizer):
        raise ArgumentError("optimizer", name, "has step hooks, which would not see gradients; remove them")
    for module in model.modules():
        if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            raise ArgumentError("model", type(module).__name__, "is not supported; give the model it wraps")
    if any(is_distributed_tensor(p) for p in model.parameters()):
        raise ArgumentError("model", "FSDP", "sharded parameters are not supported; give an unsharded model")


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
        self._objective, forget = dynamo_compile(_objective(job), job.add_program, variants)
        weakref.finalize(self, job.close, forget)
        mark_compiled(optimizer, self)

    def __call__(self, *batch: Any) -> Any:
        """Takes a step.

        Returns:
            The loss, or the loss and what ``loss_fn`` returned with it; the tensors are the caller's.
        """
        if step_pre_hooks(self.optimizer):
            raise GradweaveError("the optimizer has step hooks, which would not see gradients; remove them")
        if not torch.is_grad_enabled():
            raise GradweaveError("step() under no_grad() or inference_mode(): training needs gradients; leave it")
        batch = placed(batch, self.model)
        params = [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]
        shapes = _shapes(batch)
        if self._first_shapes is None:
            self._first_shapes = shapes
        if not self._stepped.issuperset(map(id, params)):
            return self._stock_step(batch, params)
        if self._new_shapes != "compile" and shapes != self._first_shapes:
            if self._new_shapes == "eager":
                announce(f"compile: a batch of shapes {shapes} runs eagerly")
                return self._stock_step(batch, params)
            batch = self._padded(batch, shapes)
        return self._compiled_step(batch, params)

    def _compiled_step(self, batch: Any, params: Sequence[nn.Parameter]) -> Any:
        try:
            loss, more = self._objective(*batch)
        except NoStateError:
            return self._stock_step(batch, params)
        except DynamoError as error:
            raise GradweaveError(self._explain(error)) from error
        if self._shared.finish_eagerly:
            self._stock_update(params)
        elif self._shared.update:
            mark_stepped(self.optimizer)
        return loss if more is None else (loss, more)

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

    def _padded(self, batch: Any, shapes: Sequence[Any]) -> Any:
        announce(f"compile: a batch of shapes {shapes} is padded to {self._first_shapes}")
        wanted = iter(self._first_shapes)

        def pad(value: Any) -> Any:
            shape = next(wanted)
            if not isinstance(value, torch.Tensor) or value.shape == shape:
                return value
            if value.dim() != len(shape) or any(has > want for has, want in zip(value.shape, shape, strict=True)):
                raise ArgumentError("batch", tuple(value.shape), f'new_shapes="pad" cannot make {tuple(shape)} of it')
            fill = PADDING if value.dtype in (torch.int32, torch.int64) else 0
            filled = value.new_full(shape, fill)
            filled[tuple(slice(size) for size in value.shape)] = value
            return filled

        if len(shapes) != len(self._first_shapes):
            raise ArgumentError("batch", shapes, 'new_shapes="pad" needs batches of one structure')
        return map_nested(pad, batch)

    def _stock_step(self, batch: Any, params: Sequence[nn.Parameter]) -> Any:
        """The eager step, which creates the optimizer's state."""
        if not self._stepped:
            announce("compile: the first step runs eagerly; it creates the optimizer's state")
        scaler = self._options.scaler
        loss, more = self._eager(*batch)
        (loss if scaler is None else scaler.scale(loss)).backward(inputs=list(params))
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

    def _explain(self, error: Exception) -> str:
        if isinstance(error, TooManyVariantsError):
            return (
                f"variants={self._variants}: no more graphs are kept, and this batch or this state of the model needs "
                'another one; for shapes give a larger variants, or new_shapes="pad" or "eager"; a Python number that '
                "changes from step to step, in the batch, the model or a closure, must be a tensor"
            )
        return (
            "loss_fn cannot be made one graph: take data-dependent Python and .item() out of it, or train with fuse(); "
            f"or it failed by itself: {error}"
        )


def _shapes(batch: Any) -> tuple[Any, ...]:
    return tuple(value.shape if isinstance(value, torch.Tensor) else None for value in flat_leaves(batch))


def placed(batch: Any, model: nn.Module) -> Any:
    """A batch whose tensors are where the model is."""
    device = next((p.device for p in model.parameters()), None)
    if device is None or device.type == "cpu":
        return batch

    def place(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.device.type == "cpu":
            return value.to(device, non_blocking=True)
        return value

    return map_nested(place, batch)


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

    def add_program(self, forward: GraphModule, _: Any) -> Callable[..., list[Any]]:
        """The backend that Dynamo calls."""
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

    def objective(*batch: Any) -> tuple[torch.Tensor, Any]:
        loss, more = loss_and_more(job.loss_fn(job.model, *batch))
        with torch.fx.traceback.annotate(LOSS_MARK):
            loss = loss.view(())
        return loss, more

    return objective


def loss_and_more(result: Any) -> tuple[torch.Tensor, Any]:
    """What ``loss_fn`` returned: the loss, and what came with it."""
    loss, more = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise GradweaveError("loss_fn must return a loss of one element, or a tuple of it and anything else")
    return loss, more
