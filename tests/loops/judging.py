"""Comparison of random loops with stock order, and the techniques that are compared.

A loop runs in stock order first, which records what it sees of each operation, and then with a technique attached. An
operation that torch itself refuses ends the loop.
"""

import copy
import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F

import gradweave
from gradweave._runtime.split_calls.queue import InlineLane
from gradweave.errors import GradweaveError
from gradweave.reordering.api import Reordering, layer_names, reorder
from gradweave.reordering.auto import Trial
from gradweave.schedule.costs import Costs, LayerCost
from gradweave.schedule.tasks import Demand
from loops.odd_loops import Loop, Run, batch_of
from loops.subjects import AVERAGING, Failure


@dataclass(frozen=True)
class Technique:
    """A technique and its promises.

    Attributes:
        attach: Attaches it to a model and an optimizer, and returns handles that detach.
        may_refuse: Whether it may raise before a change that stock order would not make.
        updates_in_backward: Whether weights change, as documented, before ``step()`` is called.
        splits: Whether it computes layers' weight gradients out of backward's order.
        faster: Whether a trial finds the way that it tries last to be the fastest.
    """

    attach: Callable
    may_refuse: bool = False
    updates_in_backward: bool = False
    splits: bool = False
    faster: bool = True

    def is_refusal(self, error):
        """Return whether an error is deliberate; also autograd's, of weights that were updated before another use."""
        in_place = self.updates_in_backward and "modified by an inplace operation" in str(error)
        return isinstance(error, GradweaveError) or in_place

    def promised(self, loop):
        """Return the operations of a loop without those that the documentation excludes."""
        kept, begun = [], False
        for operation in loop.operations:
            name, kind = operation[0], operation[-1]
            if self.updates_in_backward and begun and self._sees_weights(name, kind, loop.body):
                continue
            kept.append(operation)
            if self.splits and operation == ("backward", "fails"):
                kept.append(("model_zero_grad",))  # what a backward that fails leaves in .grad is another part
            begun = self.leaves_begun(operation, begun)
        if self.updates_in_backward and begun:
            kept.append(("step", "plain"))
        return tuple(kept)

    @staticmethod
    def _sees_weights(name, kind, body):
        """Return whether the result of an operation between backward and step depends on weights.

        A change through .data, a checkpoint, and what a forward adds to a norm's running averages.
        """
        if name == "forward":
            return body in AVERAGING
        return name == "save" or (name == "edit" and kind != "in place")

    @staticmethod
    def leaves_begun(operation, begun):
        """Return whether a step is under way after an operation, with gradients and without its update."""
        return {"backward": True, "step": False}.get(operation[0], begun)


def _costs(model):
    """Costs that put the first layers' weight gradients beside backward, and the others' beside the next forward."""
    idle, busy = Demand(0.1, 0.1), Demand(1.0, 1.0)
    return Costs(
        tuple(
            LayerCost(name, 2.0, 1.0, 1.0, 0.0, 1, 1, 1, "", idle, busy, Demand(0.9, 0.9), idle)
            for name in layer_names(model)
        )
    )


def _fuse(mode, **options):
    if "allow_backward" in options and "allow_backward" not in inspect.signature(gradweave.fuse).parameters:
        del options["allow_backward"]
    return lambda model, optimizer: [gradweave.fuse(model, optimizer, mode, **options)]


def _reorder(policy):
    return lambda model, optimizer: [
        reorder(model, policy, **({"costs": _costs(model)} if policy in ("joint", "cross_step") else {}))
    ]


def _tried(model, optimizer):
    return [Reordering(model, InlineLane(), None, trial=Trial(torch.device("cpu")))]


def _both(*attach):
    """Attach two techniques in turn; they are detached in the same order."""
    return lambda model, optimizer: [handle for one in attach for handle in one(model, optimizer)]


_forward = Technique(_fuse("forward"), may_refuse=True)
_backward = Technique(_fuse("backward"), may_refuse=True, updates_in_backward=True)
_auto = Technique(_fuse("auto"))
_side_stream = Technique(_reorder("side_stream"), splits=True)

TECHNIQUES = {
    "fuse forward": _forward,
    "fuse backward": _backward,
    "fuse auto, forward wins": _auto,
    "fuse auto, stock wins": replace(_auto, faster=False),
    "fuse auto, backward allowed": replace(
        _auto, attach=_fuse("auto", allow_backward=True), may_refuse=True, updates_in_backward=True
    ),
    "reorder side_stream": _side_stream,
    "reorder joint": replace(_side_stream, attach=_reorder("joint")),
    "reorder auto, split wins": replace(_side_stream, attach=_tried),
    "reorder auto, stock wins": replace(_side_stream, attach=_tried, faster=False),
    "fuse forward, cross_step": replace(_forward, attach=_both(_forward.attach, _reorder("cross_step")), splits=True),
    "fuse forward, side_stream": replace(_forward, attach=_both(_forward.attach, _side_stream.attach), splits=True),
    "side_stream, fuse backward": replace(_backward, attach=_both(_side_stream.attach, _backward.attach), splits=True),
    "fuse backward, side_stream": replace(_backward, attach=_both(_backward.attach, _side_stream.attach), splits=True),
    "fuse auto, side_stream": replace(_auto, attach=_both(_auto.attach, _side_stream.attach), splits=True),
}


def clock(faster):
    """A clock for trials, in which each span takes less time than the one before, or more."""
    now, span = 0.0, 1.0

    def perf_counter():
        nonlocal now, span
        now, span = now + span, span * (0.8 if faster else 1.25)
        return now

    return SimpleNamespace(perf_counter=perf_counter)


class DifferentError(AssertionError):
    """A loop has another result than in stock order."""


@dataclass
class Stock:
    """A run of a loop in stock order.

    Attributes:
        operations: Operations up to the first that torch refuses.
        seen: The loop's view of each operation.
        weights: Weights before the first operation and after each.
        final: Weights, buffers and the optimizer's state in the end.
    """

    operations: tuple[tuple, ...]
    seen: list
    weights: list
    final: tuple


def check(loop, technique):
    """Raise unless a technique gives the result of stock order or, if it may, refuses in time; return which."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loop = replace(loop, operations=technique.promised(loop))
        return _compare(loop, _run_stock(loop), technique)


def _run_stock(loop):
    run = Run(loop, lambda *_: ())
    operations, seen, weights = [], [], [run.do(("read", "data"))]
    for operation in loop.operations:
        try:
            seen.append(_seen_of(run, operation))
        except Exception:  # what torch refuses, for whatever reason
            return _run_stock(Loop(loop.body, loop.optimizer, tuple(operations)))
        operations.append(operation)
        weights.append(run.do(("read", "data")))
    return Stock(tuple(operations), seen, weights, _final(run))


def _compare(loop, stock, technique):
    try:
        run = Run(loop, technique.attach)
    except GradweaveError as error:
        if not technique.may_refuse:
            raise DifferentError(f"refused when attached: {error}") from error
        return "refused"
    begun = False
    for number, operation in enumerate(stock.operations):
        try:
            seen = _seen_of(run, operation)
        except Exception as error:
            if not technique.may_refuse:
                raise DifferentError(f"{operation}, number {number}: {type(error).__name__}: {error}") from error
            if not technique.is_refusal(error):
                raise
            _check_refusal(run, stock, number, technique)
            return "refused late"
        begun = technique.leaves_begun(operation, begun)
        if not (technique.updates_in_backward and begun) and not same(seen, stock.seen[number]):
            raise DifferentError(f"{operation}, number {number}: {difference(seen, stock.seen[number])}")
    for moment in ("attached", "detached"):
        for made, expected, what in zip(_final(run), stock.final, ("weights", "state"), strict=True):
            if not same(made, expected):
                raise DifferentError(f"in the end, {moment}: {what}, {difference(made, expected)}")
        run.detach()
    _check_detached(run)
    return "same"


def _seen_of(run, operation):
    """Return what a loop sees of an operation; the loop catches its own failures."""
    try:
        return run.do(operation)
    except Failure as failure:
        return str(failure)


def _final(run):
    return run.do(("read", "state_dict")), run.do(("read_state",))


def _check_refusal(run, stock, number, technique):
    """Check that nothing wrong preceded a refusal, and that the detached model trains on as in stock order."""
    run.detach()
    _check_detached(run)
    if not technique.updates_in_backward:
        weights = run.do(("read", "data"))
        if not any(same(weights, stock.weights[moment]) for moment in (number, number + 1)):
            raise DifferentError(f"refused at {stock.operations[number]}, number {number}, when weights had changed")
    if stock.operations[number][0] == "convert":
        return  # refused at the first gradient: torch leaves a model converted in part, after whatever error
    run.model.zero_grad()
    twin = copy.deepcopy((run.model, run.optimizer))
    trained = []
    for model, optimizer in (twin, (run.model, run.optimizer)):
        torch.manual_seed(1)
        _train_on(model, optimizer)
        trained.append((model.state_dict(), optimizer.state_dict()))
    if not same(*trained):
        raise DifferentError(
            f"refused at {stock.operations[number]}, number {number}, and detached, it trains on otherwise"
        )


def _train_on(model, optimizer):
    for number in range(2):
        x, y = batch_of(50 + number, model.head.weight.dtype)
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def _check_detached(run):
    """Check that a detached technique has left nothing."""
    left = [
        *(hook for m in run.model.modules() for hook in (*m._forward_pre_hooks.values(), *m._forward_hooks.values())),
        *(hook for p in run.model.parameters() for hook in (p._post_accumulate_grad_hooks or {}).values()),
        *run.optimizer._optimizer_step_pre_hooks.values(),
        *(p for p in run.model.parameters() if type(p) is not nn.Parameter),
    ]
    if left or torch.overrides._len_torch_function_stack():
        raise DifferentError(f"detached, and yet there are {left}")


def same(one, other):
    """Return whether two views of an operation are equal, tensors bit for bit."""
    if isinstance(one, torch.Tensor):
        if not isinstance(other, torch.Tensor) or one.shape != other.shape or one.dtype is not other.dtype:
            return False
        return torch.equal(one, other) or torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(v, other[k]) for k, v in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other) or (one != one and other != other)


def difference(one, other, where=""):
    """Return the first difference of two views of an operation, in words."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return next(difference(one[k], other[k], f"{where}[{k!r}]") for k in one if not same(one[k], other[k]))
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return next(difference(a, b, f"{where}[{n}]") for n, (a, b) in pairs if not same(a, b))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and one.shape == other.shape:
        return (
            f"{where} differs by {(one.double() - other.double()).abs().max().item():.3g} ({one.dtype}, {other.dtype})"
        )
    return f"{where} {one} instead of {other}"
