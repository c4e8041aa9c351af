"""``fuse()``: attaching to a model and an optimizer, and letting go again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import TracebackType
from typing import Literal, get_args
from weakref import ref

import torch
from torch import nn
from torch.optim import Optimizer

from gradweave._compat.distributed import is_distributed_tensor
from gradweave._compat.eager import load_hooks
from gradweave._runtime.claims import (
    check_is_module,
    is_in_compiled_step,
    is_in_daso,
    is_in_data_parallel,
    is_in_fusion,
    mark_fused,
)
from gradweave._runtime.module_hook import ModuleHook
from gradweave._runtime.wrapped_optimizers import without_wrapper
from gradweave.errors import ArgumentError, GradweaveError
from gradweave.fusion.auto import AutoEngine
from gradweave.fusion.backward import BackwardEngine
from gradweave.fusion.forward import ForwardEngine
from gradweave.fusion.grad_norm import NormTracker
from gradweave.fusion.independence import check_independent
from gradweave.fusion.optimizer_step import begins_whole
from gradweave.fusion.step_hooks import StepHooks

Mode = Literal["auto", "forward", "backward"]
MODES: tuple[Mode, ...] = get_args(Mode)


def fuse(
    model: nn.Module,
    optimizer: Optimizer,
    mode: Mode = "auto",
    *,
    allow_backward: bool = False,
    track_grad_norm: bool = False,
) -> Fusion:
    """Moves an optimizer's updates into backward, or into the next forward, under an unchanged loop.

    Parameters and optimizer state stay bit for bit what the same optimizer makes of them in stock
    order. ``optimizer.step()`` remains the call that ends a step.

    Args:
        model: The model whose forward and backward are run; wrapped or not.
        optimizer: Any optimizer that treats its parameters independently; also as Accelerate or
            Lightning has wrapped it.
        mode: ``"forward"`` updates a bucket of parameters before its next use, on CUDA beside the
            next forward; it works with clipping, scaling and accumulation, and gradients stay where
            they are. ``"backward"`` updates a bucket as soon as its gradients are final and frees
            them at once, before the loop can look at them: it cannot serve clipping by norm, nor a
            loop that leaves out a step. ``"auto"`` measures and keeps the fastest of what it can
            undo: stock order and forward.
        allow_backward: Let ``"auto"`` try backward too, for a loop that calls ``step()`` after
            every ``backward()`` and never uses ``.grad``.
        track_grad_norm: Keep what :meth:`Fusion.grad_norm` needs; costs a read of each gradient.

    Returns:
        A handle that detaches; also a context manager that does so at its end.
    """
    if mode not in MODES:
        raise ArgumentError("mode", mode, f"use one of {', '.join(MODES)}")
    if allow_backward and mode != "auto":
        raise ArgumentError("allow_backward", allow_backward, f'is for mode="auto"; leave it out with mode={mode!r}')
    check_is_module(model)
    own = without_wrapper(optimizer)
    _check_optimizer(own)
    _check_model(model, own, mode)
    never = ""
    if begins_whole(own):
        if mode == "backward" or allow_backward:
            raise ArgumentError(
                "mode" if mode == "backward" else "allow_backward",
                mode if mode == "backward" else allow_backward,
                f"{type(own).__name__} decides over all gradients whether a step is taken, and no update can begin "
                'in backward; use mode="forward"',
            )
    else:
        try:
            check_independent(own, remedy="train without fuse()")
        except ArgumentError as refusal:
            if mode != "auto":
                raise
            never = f"{type(own).__name__} {refusal.remedy}"
    return Fusion(model, own, mode, allow_backward=allow_backward, never=never, track_grad_norm=track_grad_norm)


def _check_optimizer(optimizer: Optimizer) -> None:
    if not isinstance(optimizer, Optimizer):
        raise ArgumentError("optimizer", type(optimizer).__name__, "give a torch.optim.Optimizer")
    if isinstance(optimizer, (torch.optim.LBFGS, torch.optim.SparseAdam)):
        raise ArgumentError(
            "optimizer",
            type(optimizer).__name__,
            "needs all parameters, or sparse gradients, at once; train without fuse(), or with SGD, Adam or AdamW",
        )
    if optimizer.defaults.get("differentiable"):
        raise ArgumentError("optimizer", "differentiable=True", "construct it with differentiable=False")
    if is_in_compiled_step(optimizer):
        raise ArgumentError(
            "optimizer", type(optimizer).__name__, "is part of a compiled step, which fuses it; drop that step first"
        )
    if is_in_daso(optimizer):
        raise ArgumentError(
            "optimizer", type(optimizer).__name__, "has a DASO, which averages before updates; detach() that first"
        )
    if is_in_data_parallel(optimizer):
        raise ArgumentError(
            "optimizer", type(optimizer).__name__, "is in a DataParallel, which defers its updates; detach() that first"
        )
    if is_in_fusion(optimizer):
        raise ArgumentError("optimizer", type(optimizer).__name__, "is fused already; detach() the first fusion")


def _check_model(model: nn.Module, optimizer: Optimizer, mode: str) -> None:
    for module in model.modules():
        if isinstance(module, nn.DataParallel):
            raise ArgumentError("model", "DataParallel", "copies weights behind our back; use DistributedDataParallel")
        if mode == "backward" and isinstance(module, nn.parallel.DistributedDataParallel):
            raise ArgumentError("mode", mode, 'would see gradients before DDP has averaged them; use mode="forward"')
    _check_neighbours(model, optimizer)
    own = {id(p) for p in model.parameters()}
    for group in optimizer.param_groups:
        for p in group["params"]:
            if isinstance(p, nn.UninitializedParameter):
                raise ArgumentError(
                    "model", "a lazy module", "its parameters have no shape yet; run a batch through the model first"
                )
            if is_distributed_tensor(p):
                raise ArgumentError("model", "FSDP", "sharded parameters are not supported yet; train without fuse()")
            if id(p) not in own:
                raise ArgumentError(
                    "optimizer",
                    f"a parameter of shape {tuple(p.shape)}",
                    "is not in the model; give the model that owns it",
                )


def _check_neighbours(model: nn.Module, optimizer: Optimizer) -> None:
    """Another optimizer on the same model is welcome, one on the same parameters is not."""
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for mark, _ in _fusions(model):
        if not own.isdisjoint(mark.params):
            raise ArgumentError(
                "optimizer",
                type(optimizer).__name__,
                "shares parameters with one that is fused; detach() that fusion first (gradweave.fusion.fusions_of("
                "model) finds it again, in a notebook whose cell is run twice for example)",
            )


def fusions_of(model: nn.Module) -> list[Fusion]:
    """All fusions that are attached to a model, or to parts of it."""
    return list(dict.fromkeys(fusion for _, fusion in _fusions(model)))


def is_fused(model: nn.Module) -> bool:
    """Whether any of a model's parameters belongs to a fusion."""
    return any(isinstance(mark, _Mark) and mark.params for module in model.modules() for mark in load_hooks(module))


def updated_in_forward(model: nn.Module) -> frozenset[int]:
    """By ``id``, the parameters of a model that a fusion with ``mode="forward"`` updates."""
    return frozenset(p for mark, fusion in _fusions(model) if fusion.mode == "forward" for p in mark.params)


def updated_in_backward(model: nn.Module) -> dict[int, Fusion]:
    """By ``id``, the parameters of a model that a fusion with ``mode="backward"`` updates, with that fusion."""
    return {p: fusion for mark, fusion in _fusions(model) if fusion.mode == "backward" for p in mark.params}


def is_deferred_in_graph(model: nn.Module) -> bool:
    """Whether a CUDA graph of several steps is being captured, with updates deferred from each to the next."""
    return any(fusion.in_graph_now for _, fusion in _fusions(model))


def _fusions(model: nn.Module) -> Iterator[tuple[_Mark, Fusion]]:
    for module in model.modules():
        for mark in load_hooks(module):
            if isinstance(mark, _Mark) and (fusion := mark.fusion()) is not None:
                yield mark, fusion


class _Mark(ModuleHook):
    """Says which of a module's parameters are fused, for the next fuse() to find; a copy says none."""

    def __init__(
        self, params: frozenset[int] = frozenset(), fusion: Callable[[], Fusion | None] = lambda: None
    ) -> None:
        super().__init__()
        self.params = params
        self.fusion = fusion

    def __deepcopy__(self, _: object) -> _Mark:
        return _Mark()

    def __reduce__(self) -> tuple[type[_Mark], tuple[()]]:
        return _Mark, ()


def _mark_owners(model: nn.Module, optimizer: Optimizer, fusion: Fusion, undo: ExitStack) -> None:
    """Leaves a mark where each parameter lives; a hook on loading costs nothing in training.

    A ScriptModule takes no mark: its owner has it.
    """
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        scripted = [child for child in module.children() if isinstance(child, torch.jit.ScriptModule)]
        params = [*module.parameters(recurse=False), *(p for child in scripted for p in child.parameters())]
        marked = frozenset(map(id, params)) & own
        if marked:
            mark = module.register_load_state_dict_post_hook(_Mark(marked, ref(fusion)))
            undo.callback(mark.remove)


class Fusion:
    """What :func:`fuse` returns: a hold on the attachment."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        mode: Mode,
        *,
        allow_backward: bool,
        never: str,
        track_grad_norm: bool,
    ) -> None:
        self.mode = mode
        self.optimizer = optimizer
        self._norms = NormTracker(enabled=track_grad_norm)
        self._engine: AutoEngine | BackwardEngine | ForwardEngine | None
        with ExitStack() as undo:  # whatever fails on the way, nothing stays behind
            if mode == "backward":
                self._engine = BackwardEngine(optimizer, self._norms)
            elif mode == "forward":
                self._engine = ForwardEngine(model, optimizer, self._norms)
            else:
                self._engine = AutoEngine(model, optimizer, self._norms, allow_backward=allow_backward, never=never)
            undo.callback(self._engine.detach)
            hooks = StepHooks(
                optimizer,
                self._engine.before_step,
                self._engine.after_step,
                check_stock_order=self._engine.check_stock_order,
            )
            undo.callback(hooks.remove)
            _mark_owners(model, optimizer, self, undo)
            undo.callback(mark_fused, optimizer, None)
            mark_fused(optimizer, self)
            self._undo = undo.pop_all()

    def __enter__(self) -> Fusion:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    def flush(self) -> None:
        """Applies every update that step() has decided and that is not in the weights yet.

        Reading a parameter does this for what it needs; call it before something that reads
        weights behind torch's back.
        """
        self._attached().flush()

    def detach(self) -> None:
        """Applies what is pending and lets go: the model and ``step()`` are stock again."""
        if self._engine is not None:
            self._engine = None
            self._undo.close()

    @contextmanager
    def no_update(self) -> Iterator[None]:
        """Backwards inside only accumulate gradients: for all micro-batches of a step but the last."""
        engine = self._attached()
        before, engine.accumulating = engine.accumulating, True
        try:
            yield
        finally:
            engine.accumulating = before

    @contextmanager
    def in_graph(self) -> Iterator[None]:
        """Inside the capture of a CUDA graph of several steps: updates are deferred from each step to the next.

        All of them are applied at the end. Without it a captured step has its updates in stock order.
        """
        engine = self._attached()
        if not isinstance(engine, ForwardEngine):
            raise GradweaveError(f'in_graph() with mode={self.mode!r}: only mode="forward" defers updates')
        if engine.is_pending:
            raise GradweaveError("in_graph() with updates pending: call fusion.flush() before the capture begins")
        engine.in_graph = True
        try:
            yield
            engine.flush()
        finally:
            engine.in_graph = False

    @property
    def is_attached(self) -> bool:
        """Whether it has not been detached."""
        return self._engine is not None

    def takes_late(self, p: torch.Tensor) -> bool:
        """Whether the next that uses a gradient is an update in backward, which can wait for it."""
        return isinstance(self._engine, BackwardEngine) and self._engine.takes_late(p)

    @property
    def in_graph_now(self) -> bool:
        """Whether :meth:`in_graph` is in force."""
        return isinstance(self._engine, ForwardEngine) and self._engine.in_graph

    def accept_partial(self) -> None:
        """After a backward that failed halfway in backward mode: goes on with the weights as they are."""
        self._attached().accept_partial()

    def grad_norm(self) -> torch.Tensor:
        """The norm over all gradients of the last step, as clipping computes it, before any clipping."""
        return self._norms.total()

    def record(self, recorder: Callable[[int], AbstractContextManager[None]] | None) -> None:
        """Runs each bucket's update inside ``recorder(bucket)``, for timelines; None ends it."""
        self._attached().record(recorder)

    def explain(self) -> str:
        """What is done, and why."""
        if self._engine is None:
            return "detached: stock order"
        return f"mode={self.mode!r}: {self._engine.describe()}"

    def _attached(self) -> AutoEngine | BackwardEngine | ForwardEngine:
        if self._engine is None:
            raise GradweaveError("this fusion is detached; call fuse() again")
        return self._engine
