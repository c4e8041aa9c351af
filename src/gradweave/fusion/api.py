"""``fuse()``, and the handle that it returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Literal, get_args

import torch
from torch import nn
from torch.optim import Optimizer

from gradweave._runtime.attachment import AccumulatingAttachment
from gradweave._runtime.claims import Technique, claim_model, claim_optimizer, claims_on, holders_of, is_claimed
from gradweave._runtime.composition import refuse_conflicts
from gradweave._runtime.optimizer_steps.hooks import StepHooks
from gradweave._runtime.optimizer_steps.independence import check_independent, keeps_gradients
from gradweave._runtime.requirements import (
    refuse_copies,
    refuse_sharded,
    require_module,
    require_optimizer,
    require_owned,
    require_shapes,
    require_undifferentiated,
)
from gradweave._runtime.two_phase_step import is_two_phase
from gradweave._runtime.wrapped_optimizers import without_wrapper
from gradweave.errors import ArgumentError, GradweaveError, UnsupportedError
from gradweave.fusion.auto import AutoEngine
from gradweave.fusion.backward import BackwardEngine
from gradweave.fusion.forward import ForwardEngine
from gradweave.fusion.grad_norm import NormTracker

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
    """Move an optimizer's updates into backward, or into the next forward, under an unchanged loop.

    Parameters and optimizer state are bit for bit what the same optimizer computes in stock order. ``optimizer.step()``
    remains the call that ends a step.

    Args:
        model: The model whose forward and backward are run; wrapped or not.
        optimizer: Any optimizer that treats its parameters independently; also one wrapped by Accelerate or Lightning.
        mode: ``"forward"`` updates a bucket of parameters before its next use, on CUDA beside the next forward. It
            supports clipping, scaling and accumulation, and keeps gradients. ``"backward"`` updates a bucket as soon as
            its gradients are final and frees them at once, before the loop can look at them. It supports neither
            clipping by norm nor loops that skip a step. ``"auto"`` measures stock order and forward, between which it
            can change at any time, and keeps the faster one.
        allow_backward: Let ``"auto"`` try backward too, for a loop that calls ``step()`` after every ``backward()`` and
            never uses ``.grad``.
        track_grad_norm: Compute what :meth:`Fusion.grad_norm` needs, which costs a read of each gradient.

    Returns:
        A handle that detaches; also a context manager that detaches at its end.
    """
    if mode not in MODES:
        raise ArgumentError("mode", mode, f"use one of {', '.join(MODES)}")
    if allow_backward and mode != "auto":
        raise ArgumentError("allow_backward", allow_backward, f'is for mode="auto"; leave it out with mode={mode!r}')
    require_module(model)
    own = without_wrapper(optimizer)
    _check_optimizer(own)
    _check_model(model, own, mode)
    only_stock = _check_step(own, mode, allow_backward=allow_backward)
    if not only_stock and (mode == "backward" or allow_backward) and keeps_gradients(own):
        if mode == "backward":
            raise UnsupportedError(
                type(own).__name__, 'keeps gradients in its state, and mode="backward" frees them', 'use mode="forward"'
            )
        allow_backward = False
    return Fusion(
        model, own, mode, allow_backward=allow_backward, only_stock=only_stock, track_grad_norm=track_grad_norm
    )


def _check_optimizer(optimizer: Optimizer) -> None:
    require_optimizer(
        optimizer,
        refused=(torch.optim.LBFGS, torch.optim.SparseAdam),
        remedy="it needs all parameters at once, or sparse gradients; train without fuse(), or with SGD or AdamW",
    )
    require_undifferentiated(optimizer)
    if is_claimed(optimizer, Technique.FUSE):
        raise UnsupportedError(
            f"fuse of {type(optimizer).__name__}", "it is fused already", "detach() the first fusion"
        )


def _check_step(optimizer: Optimizer, mode: Mode, *, allow_backward: bool) -> str:
    """Raise if a mode cannot run an optimizer's step in parts; return why ``"auto"`` has only stock order, if so."""
    if is_two_phase(optimizer):
        if mode == "backward" or allow_backward:
            argument, value = ("mode", mode) if mode == "backward" else ("allow_backward", allow_backward)
            raise ArgumentError(
                argument,
                value,
                f"{type(optimizer).__name__} decides over all gradients whether a step is taken, so that no update can "
                'begin in backward; use mode="forward"',
            )
        return ""
    try:
        check_independent(optimizer, remedy="train without fuse()")
    except UnsupportedError as refusal:
        if mode != "auto":
            raise
        return f"{type(optimizer).__name__} {refusal.reason}"
    return ""


def _check_model(model: nn.Module, optimizer: Optimizer, mode: Mode) -> None:
    refuse_copies(model)
    averaged = any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules())
    if mode == "backward" and averaged:
        raise ArgumentError("mode", mode, 'would see gradients before DDP has averaged them; use mode="forward"')
    refuse_conflicts(Technique.FUSE, model=model, optimizer=optimizer)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    own = set(map(id, params))
    if any(not own.isdisjoint(claim.params) for claim in claims_on(model, Technique.FUSE)):
        raise UnsupportedError(
            f"fuse of {type(optimizer).__name__}",
            "it shares parameters with another optimizer that is fused",
            "detach() that fusion first (gradweave.fusion.fusions_of(model) finds it, for example if a notebook "
            "cell has run twice)",
        )
    require_shapes(params)
    refuse_sharded(model, params, remedy="train without fuse()")
    require_owned(model, optimizer)


def fusions_of(model: nn.Module) -> list[Fusion]:
    """Return all fusions that are attached to a model, or to parts of it."""
    return holders_of(model, Technique.FUSE)


class Fusion(AccumulatingAttachment):
    """The handle that :func:`fuse` returns."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        mode: Mode,
        *,
        allow_backward: bool,
        only_stock: str,
        track_grad_norm: bool,
    ) -> None:
        self.mode = mode
        self.optimizer = optimizer
        self._norms = NormTracker(enabled=track_grad_norm)
        self._engine: AutoEngine | BackwardEngine | ForwardEngine | None
        with ExitStack() as undo:  # if any part fails, those before it are undone
            if mode == "backward":
                self._engine = BackwardEngine(optimizer, self._norms)
            elif mode == "forward":
                self._engine = ForwardEngine(model, optimizer, self._norms)
            else:
                self._engine = AutoEngine(
                    model, optimizer, self._norms, allow_backward=allow_backward, only_stock=only_stock
                )
            undo.callback(self._engine.detach)
            hooks = StepHooks(
                optimizer,
                self._engine.before_step,
                self._engine.after_step,
                check_stock_order=self._engine.check_stock_order,
            )
            undo.callback(hooks.remove)
            params = frozenset(id(p) for group in optimizer.param_groups for p in group["params"])
            claim_model(model, Technique.FUSE, self, undo, params=params)
            claim_optimizer(optimizer, Technique.FUSE, self, undo, keep_alive=True)
            self._undo = undo.pop_all()

    def flush(self) -> None:
        """Apply every update that is pending.

        Reading a parameter applies its own update. Call this before code that reads weights without torch functions.
        """
        self._attached().flush()

    def detach(self) -> None:
        """Apply what is pending and detach: the model and ``step()`` are stock again."""
        if self._engine is not None:
            self._engine = None
            self._undo.close()

    @contextmanager
    def no_update(self) -> Iterator[None]:
        """Return a context in which backwards only accumulate, for all micro-batches of a step but the last."""
        engine = self._attached()
        before, engine.accumulating = engine.accumulating, True
        try:
            yield
        finally:
            engine.accumulating = before

    @contextmanager
    def in_graph(self) -> Iterator[None]:
        """Return a context, inside the capture of a CUDA graph of several steps, that defers updates to the next step.

        All of them are applied at its end. Without it a captured step updates in stock order.
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
        """Whether the fusion has not been detached."""
        return self._engine is not None

    def takes_late(self, p: torch.Tensor) -> bool:
        """Return whether the next use of a gradient is an update in backward, which can wait for it."""
        return isinstance(self._engine, BackwardEngine) and self._engine.takes_late(p)

    @property
    def in_graph_now(self) -> bool:
        """Whether the context of :meth:`in_graph` is active."""
        return isinstance(self._engine, ForwardEngine) and self._engine.in_graph

    def accept_partial(self) -> None:
        """Go on with the weights as they are after a backward that failed halfway, in backward mode."""
        self._attached().accept_partial()

    def grad_norm(self) -> torch.Tensor:
        """Return the norm over all gradients of the last step, as clipping computes it, before any clipping."""
        return self._norms.total()

    def record(self, recorder: Callable[[int], AbstractContextManager[None]] | None) -> None:
        """Run each bucket's update inside ``recorder(bucket)``, for timelines; None: no longer."""
        self._attached().record(recorder)

    def explain(self) -> str:
        """Return what the fusion does, and why."""
        if self._engine is None:
            return "detached: stock order"
        return f"mode={self.mode!r}: {self._engine.describe()}"

    def _attached(self) -> AutoEngine | BackwardEngine | ForwardEngine:
        if self._engine is None:
            raise GradweaveError("this fusion is detached; call fuse() again")
        return self._engine
