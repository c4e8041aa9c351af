"""Weight gradients that a stage's X leaves behind for its W, which may come much later."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import nn

from gradweave._compat.eager import gradient_hooks
from gradweave.reordering.gradient_node import Pending, Tap
from gradweave.reordering.interception import SplitCalls
from gradweave.reordering.lanes import InLine
from gradweave.reordering.queue import Task, WeightGradientQueue
from gradweave.reordering.shared_nodes import Call

Parameters = tuple[nn.Parameter, nn.Parameter | None]
"""A weight and its bias."""


class Ledger:
    """What all stages of a rank hold back, oldest first, within a bound of bytes.

    Args:
        byte_budget: What they may keep alive, besides what forward keeps anyway; beyond it, the oldest are
            computed before their turn. None for no bound.

    Attributes:
        most_held: The most bytes that were ever held back.
    """

    def __init__(self, byte_budget: int | None) -> None:
        self.most_held = 0
        self._byte_budget = byte_budget
        self._waiting: deque[Left] = deque()

    def add(self, left: Left) -> None:
        """Takes note of what an X has left; computes what is too much."""
        self._waiting.append(left)
        while self._waiting and self._waiting[0].is_done:
            self._waiting.popleft()
        held = sum(one.held for one in self._waiting)
        while self._byte_budget is not None and held > self._byte_budget:
            oldest = self._waiting.popleft()
            held -= oldest.held
            oldest.run()
        self.most_held = max(self.most_held, held)

    def clear(self) -> None:
        """Forgets everything: a step has failed."""
        self._waiting.clear()


class Left:
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
        return sum(task.held for _, task in self._tasks or ())

    def run(self) -> None:
        """Computes them, unless that was done, and adds them to the gradients.

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
                _deliver(p, grad.to(p.dtype))


def _deliver(p: nn.Parameter, grad: torch.Tensor) -> None:
    """Adds to a gradient; by way of autograd where somebody wants to hear of it."""
    if gradient_hooks(p):
        with torch.enable_grad():
            p.backward(grad)
    elif p.grad is None:
        p.grad = grad
    else:
        p.grad += grad


class HeldTap(Tap):
    """A weight and its bias as a stage's layers use them, with no way back to the weight through autograd."""

    def __init__(self, layer: int, weight: torch.Tensor, bias: torch.Tensor | None, held: HeldGradients) -> None:
        self.pending = _Leaving(layer, (weight, bias), held)  # type: ignore[arg-type]
        self.weight, self.bias = _apart(weight), None if bias is None else _apart(bias)
        self._leaf = True
        self._low = {}


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


class _Leaving(Pending):
    """Where a tap's calls leave their tasks: with the stage, not with the tap."""

    def __init__(self, layer: int, params: Parameters, held: HeldGradients) -> None:
        super().__init__(layer, held.queue, *params)
        self._params = params
        self._held = held

    @property
    def may_outlive(self) -> bool:
        """They do: W comes after the backward that is X."""
        return True

    def leave(self, task: Task) -> None:
        """Leaves the weight gradient of a call; called in backward."""
        task.watch_inputs()
        self._held.tasks.append((self._params, task))


class HeldGradients:
    """Where the backward of a stage leaves weight gradients until the schedule's W.

    Args:
        ledger: Of this rank.

    Attributes:
        tasks: What the backward that runs now has left.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.tasks: list[tuple[Parameters, Task]] = []
        self.queue = WeightGradientQueue(InLine())
        self._ledger = ledger

    def calls(self) -> HeldCalls:
        """Context for a forward whose weight gradients are to be held back."""
        return HeldCalls(self)

    def build(self) -> Callable[[], None]:
        """What computes the weight gradients of the backward that has just run: torch's ``dw_builder``."""
        left, self.tasks = Left(self.tasks), []
        self._ledger.add(left)
        return left.run


class HeldCalls(SplitCalls):
    """As :class:`SplitCalls`, for weights that are parameters; other weights keep their gradients in line."""

    def __init__(self, held: HeldGradients) -> None:
        super().__init__(held.queue)
        self._held = held
        self._taps: dict[tuple[int, int], tuple[HeldTap, torch.Tensor, torch.Tensor | None]] = {}

    def _tap(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Tap | Call:
        plain = isinstance(weight, nn.Parameter) and (bias is None or isinstance(bias, nn.Parameter))
        if not plain:
            return super()._tap(weight, bias)
        key = id(weight), id(bias)
        if key not in self._taps or not self._taps[key][0].stands_for(weight):
            self._taps[key] = HeldTap(len(self._taps), weight, bias, self._held), weight, bias
        return self._taps[key][0]
