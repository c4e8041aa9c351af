"""``compile()``: a training step as one function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.optim import Optimizer

from gradweave.announce import announce
from gradweave.compat import dynamo_compile, is_distributed_tensor, map_nested, mark_stepped, step_pre_hooks
from gradweave.errors import ArgumentError, GradweaveError
from gradweave.whole_step.optimizer_inputs import NoStateError
from gradweave.whole_step.program import LOSS_MARK, Program, StepOptions
from gradweave.whole_step.trace import Clipping

LOWERINGS = ("inductor", "replay")
_FUSED = "_gradweave_fusion"


def compile(  # noqa: A001
    model: nn.Module,
    loss_fn: Callable[..., Any],
    optimizer: Optimizer,
    *,
    max_grad_norm: float | None = None,
    max_grad_value: float | None = None,
    lower: str = "inductor",
    variants: int = 8,
) -> Step:
    """Makes one graph of a whole training step: forward, backward, clipping and update.

    ``loss = step(*batch)`` then does what these lines did::

        loss = loss_fn(model, *batch)
        loss.backward()
        clip_grad_norm_(model.parameters(), max_grad_norm)
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
        lower: ``"inductor"`` compiles the graph and, on a GPU, replays it as one CUDA graph;
            ``"replay"`` runs the traced operations as they are, bit for bit the eager step.
        variants: How many graphs to keep, for shapes of batches and modes of the model.

    Returns:
        The step, to be called with a batch.
    """
    if lower not in LOWERINGS:
        raise ArgumentError("lower", lower, f"use one of {', '.join(LOWERINGS)}")
    if variants < 1:
        raise ArgumentError("variants", variants, "give at least 1")
    for name, limit in (("max_grad_norm", max_grad_norm), ("max_grad_value", max_grad_value)):
        if limit is not None and not limit > 0:
            raise ArgumentError(name, limit, "give a positive number, or None")
    _check(model, optimizer)
    return Step(model, loss_fn, optimizer, Clipping(max_grad_norm, max_grad_value), lower=lower, variants=variants)


def _check(model: nn.Module, optimizer: Optimizer) -> None:
    if not isinstance(optimizer, Optimizer):
        raise ArgumentError("optimizer", type(optimizer).__name__, "give a torch.optim.Optimizer")
    name = type(optimizer).__name__
    if isinstance(optimizer, (torch.optim.LBFGS, torch.optim.SparseAdam)):
        raise ArgumentError("optimizer", name, "cannot be traced; use SGD, Adam, AdamW or another of torch.optim")
    if optimizer.defaults.get("differentiable"):
        raise ArgumentError("optimizer", "differentiable=True", "construct it with differentiable=False")
    if getattr(optimizer, _FUSED, None) is not None:
        raise ArgumentError("optimizer", name, "is fused; detach() the fusion first, compile() does its work")
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
        clipping: Clipping,
        *,
        lower: str,
        variants: int,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self._loss_fn = loss_fn
        self._clipping = clipping
        self._options = StepOptions(clipping, lower, capture=True, report=lambda doing: announce(f"compile: {doing}"))
        self._stepped: set[int] = set()
        self._norm: torch.Tensor | None = None
        self._latest: Program | None = None
        self._objective = dynamo_compile(_objective(model, loss_fn), self._backend, variants)

    def __call__(self, *batch: Any) -> Any:
        """Takes a step.

        Returns:
            The loss, or the loss and what ``loss_fn`` returned with it; the tensors are the caller's.
        """
        if not torch.is_grad_enabled():
            raise GradweaveError("step() under no_grad() or inference_mode(): training needs gradients; leave it")
        batch = self._placed(batch)
        params = [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]
        if not self._stepped.issuperset(map(id, params)):
            return self._stock_step(batch, params)
        try:
            loss, more = self._objective(*batch)
        except NoStateError:
            return self._stock_step(batch, params)
        mark_stepped(self.optimizer)
        return loss if more is None else (loss, more)

    @property
    def grad_norm(self) -> torch.Tensor:
        """The norm of all gradients of the last step, before it was clipped."""
        if self._norm is None:
            raise GradweaveError("no norm was computed: give max_grad_norm to compile(), and take a step")
        return self._norm

    def _placed(self, batch: Sequence[Any]) -> Any:
        device = next((p.device for p in self.model.parameters()), None)
        if device is None or device.type == "cpu":
            return batch

        def place(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.device.type == "cpu":
                return value.to(device, non_blocking=True)
            return value

        return map_nested(place, tuple(batch))

    def _backend(self, forward: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        program = Program(forward, self.model, self.optimizer, self._options)

        def run(*inputs: Any) -> list[Any]:
            outputs = program(*inputs)
            self._norm = program.norm
            return outputs

        return run

    def _stock_step(self, batch: Sequence[Any], params: Sequence[nn.Parameter]) -> Any:
        """The eager step, which creates the optimizer's state."""
        announce("compile: the first step runs eagerly; it creates the optimizer's state")
        for p in params:
            p.grad = None
        loss, more = _objective(self.model, self._loss_fn)(*batch)
        loss.backward()
        if self._clipping.max_norm is not None:
            self._norm = nn.utils.clip_grad_norm_(params, self._clipping.max_norm)
        if self._clipping.max_value is not None:
            nn.utils.clip_grad_value_(params, self._clipping.max_value)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._stepped = {id(p) for p in params}
        detached = map_nested(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, more)
        return loss.detach() if more is None else (loss.detach(), detached)


def _objective(model: nn.Module, loss_fn: Callable[..., Any]) -> Callable[..., tuple[torch.Tensor, Any]]:
    """The function that is captured; the operation that gives the loss is marked."""

    def objective(*batch: Any) -> tuple[torch.Tensor, Any]:
        result = loss_fn(model, *batch)
        loss, more = result if isinstance(result, tuple) else (result, None)
        with torch.fx.traceback.annotate(LOSS_MARK):
            loss = loss.view(())
        return loss, more

    return objective
