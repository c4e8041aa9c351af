"""Weight gradients that a stage's X leaves behind for its W, which may come much later."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import nn

from gradweave._compat.autograd import gradient_hooks
from gradweave._runtime.split_calls.autocast_cache import AutocastNotes
from gradweave._runtime.split_calls.mode import CallSplitter
from gradweave._runtime.split_calls.task import Task
from gradweave._runtime.split_calls.weights import WeightCopies

Parameters = tuple[nn.Parameter, nn.Parameter | None]
"""A weight and its bias."""


class WeightGradientLedger:
    """The weight gradients that all stages of a rank owe, oldest first, within a bound of bytes.

    Args:
        byte_budget: What they may keep alive, besides what forward keeps anyway; beyond it, the oldest are
            computed before their turn. None for no bound.

    Attributes:
        most_held: The most bytes that they ever kept alive.
    """

    def __init__(self, byte_budget: int | None) -> None:
        self.most_held = 0
        self._byte_budget = byte_budget
        self._waiting: deque[StageWeightGradients] = deque()

    def add(self, gradients: StageWeightGradients) -> None:
        """Enter what an X has left behind; compute what is too much."""
        self._waiting.append(gradients)
        while self._waiting and self._waiting[0].is_done:
            self._waiting.popleft()
        held = sum(one.held for one in self._waiting)
        while self._byte_budget is not None and held > self._byte_budget:
            oldest = self._waiting.popleft()
            held -= oldest.held
            oldest.run()
        self.most_held = max(self.most_held, held)

    def clear(self) -> None:
        """Forget everything, as after a step that failed."""
        self._waiting.clear()


class StageWeightGradients:
    """The weight gradients of one stage and micro-batch."""

    def __init__(self, tasks: list[tuple[Parameters, Task]]) -> None:
        self._tasks: list[tuple[Parameters, Task]] | None = tasks

    @property
    def is_done(self) -> bool:
        """Whether they were computed."""
        return self._tasks is None

    @property
    def held(self) -> int:
        """Bytes that are kept alive for them."""
        return sum(task.held_bytes for _, task in self._tasks or ())

    def run(self) -> None:
        """Compute them, unless that was done, and add them to the gradients.

        A weight that was used several times has its gradients summed up first, as autograd does.
        """
        tasks, self._tasks = self._tasks, None
        sums: dict[nn.Parameter, torch.Tensor] = {}
        with torch.no_grad():
            for params, task in tasks or ():
                task.finish()
                for p, grad in zip(params, task.take(), strict=True):
                    if p is not None and grad is not None:
                        sums[p] = sums[p] + grad if p in sums else grad
            for p, grad in sums.items():
                _accumulate(p, grad.to(p.dtype))


def _accumulate(p: nn.Parameter, grad: torch.Tensor) -> None:
    """Add to a gradient."""
    if gradient_hooks(p):
        # Only autograd runs a parameter's hooks: a backward of the parameter itself is the accumulation alone.
        with torch.enable_grad():
            p.backward(grad)
    elif p.grad is None:
        p.grad = grad
    else:
        p.grad += grad


class StageSplit:
    """The split of a stage's backward: X leaves weight gradients here, W computes them.

    Args:
        ledger: Of this rank.

    Attributes:
        tasks: What the backward that runs now has left.
    """

    def __init__(self, ledger: WeightGradientLedger) -> None:
        self.tasks: list[tuple[Parameters, Task]] = []
        self._ledger = ledger

    def calls(self) -> CallSplitter:
        """Return the context of a forward whose backward is split."""
        return CallSplitter(_StageWeights(self.leave))

    def leave(self, params: Parameters, task: Task) -> None:
        """Take the weight gradient of a call; called in backward."""
        task.watch_inputs()
        self.tasks.append((params, task))

    def build(self) -> Callable[[], None]:
        """Return what computes the weight gradients of the backward that has just run: torch's ``dw_builder``."""
        gradients, self.tasks = StageWeightGradients(self.tasks), []
        self._ledger.add(gradients)
        return gradients.run


class _StageWeights:
    """The weights of one forward of a stage, by pairs of weight and bias that are parameters.

    Weights that are computed are left out: their calls run stock, and X computes their gradients.
    """

    def __init__(self, leave: Callable[[Parameters, Task], None]) -> None:
        self.autocast_notes = AutocastNotes()
        self._leave = leave
        # By id: the entry keeps weight and bias alive, so that no other tensor gets their ids.
        self._by_pair: dict[tuple[int, int], tuple[_StageCallWeights, torch.Tensor, torch.Tensor | None]] = {}

    def of_call(self, weight: torch.Tensor, bias: torch.Tensor | None) -> _StageCallWeights | None:
        """Return what a call uses in place of a weight and its bias; None for weights that are computed."""
        if not isinstance(weight, nn.Parameter) or not (bias is None or isinstance(bias, nn.Parameter)):
            return None
        key = id(weight), id(bias)
        if key not in self._by_pair or not self._by_pair[key][0].stands_for(weight):
            self._by_pair[key] = _StageCallWeights(len(self._by_pair), (weight, bias), self._leave), weight, bias
        return self._by_pair[key][0]

    def has_stand_in(self, param: object) -> bool:  # noqa: ARG002
        """Return False: what other operations make of a weight is in X, as autograd does it."""
        return False

    def stand_in(self, param: torch.Tensor) -> torch.Tensor:
        """Return the parameter itself."""
        return param


class _StageCallWeights:
    """A weight and its bias as a stage's calls use them, cut off from autograd: no backward reaches the parameters."""

    def __init__(self, layer: int, params: Parameters, leave: Callable[[Parameters, Task], None]) -> None:
        weight, bias = params
        self.sink = _StageSink(layer, params, leave)
        self._copies = WeightCopies(_cut_off(weight), None if bias is None else _cut_off(bias), is_leaf=True)

    def stands_for(self, weight: torch.Tensor) -> bool:
        """Return whether the weight is still in the memory in which it was."""
        return self._copies.stands_for(weight)

    def use(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return weight and bias in a precision."""
        return self._copies.in_precision(dtype)


def _cut_off(p: nn.Parameter) -> torch.Tensor:
    # It must require a gradient as the parameter does: the call decides by that which gradients it leaves.
    return p.detach().requires_grad_(p.requires_grad)


class _StageSink:
    """The destination of weight gradients in a stage, where they stay until W.

    Attributes:
        layer: Number of the pair of weight and bias.
        may_outlive_backward: Always: W comes after the backward that is X.
    """

    may_outlive_backward = True

    def __init__(self, layer: int, params: Parameters, leave: Callable[[Parameters, Task], None]) -> None:
        self.layer = layer
        self._params = params
        self._leave = leave

    def differentiable(self, weight: torch.Tensor, *, of_call: bool) -> torch.Tensor:  # noqa: ARG002
        """Return the weight as it is."""
        return weight

    def add(self, task: Task) -> None:
        """Leave the weight gradient of a call with the stage."""
        self._leave(self._params, task)
