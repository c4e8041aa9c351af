"""How long weight gradients take beside parts of forward and backward, on two streams of a GPU."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch

from gradweave.compat.calls import EveryCall
from gradweave.profile.sharing import equal_groups, fit_shares, slowdown
from gradweave.schedule.costs import Costs
from gradweave.schedule.tasks import Demand, Kind

MOST_GROUPS = 6
"""Groups of layers that are measured together: the pairs of them take a few seconds."""
_LEAST_SECONDS = 1e-3
"""For which a group is repeated: what two streams share is not seen in less than their launches take."""
_TURNS = 5

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]
Part = tuple[Kind, int]
"""A kind of task, and a group of layers."""
UPDATE: Part = (Kind.U, 0)
"""The update of all layers, which is one call."""


class Calls:
    """Keeps the operations of a step by task, with all that they read, so that they can be done again."""

    def __init__(self) -> None:
        self.of: dict[tuple[Kind, int], list[Call]] = defaultdict(list)

    @contextmanager
    def task(self, kind: Kind, layer: int) -> Iterator[None]:
        """Keeps what is called inside; updates are left out."""
        if kind is Kind.U:
            yield
            return
        kept = self.of[kind, layer]
        with EveryCall(lambda *call: kept.append(call)):
            yield

    def run(self, kind: Kind, layers: Sequence[int]) -> None:
        """Does the operations of some layers again, in the order of backward or forward."""
        for layer in layers if kind is Kind.F else reversed(layers):
            for function, args, kwargs in self.of[kind, layer]:
                function(*args, **kwargs)


def with_shares(
    costs: Costs,
    calls: Calls,
    update: Callable[[], None] | None,
    device: torch.device,
    progress: Callable[[str, float], None] = lambda *_: None,
) -> Costs:
    """Costs with the shares of the device that tasks take, from how groups of layers run beside each other.

    A weight gradient is tried beside the input gradients of its own group and of those below, and beside
    the next forward of the groups below; the update of all layers beside all of these. What is not tried
    keeps the whole device.

    Args:
        costs: Of each task alone.
        calls: What each task does.
        update: Updates all layers in a way that can be captured; None if there is none.
        device: Where.
        progress: Told what is going on, and the share that is done.
    """
    layers = costs.layers
    groups = equal_groups([c.forward + c.input_grad + c.weight_grad for c in layers], MOST_GROUPS)
    with torch.no_grad(), torch.cuda.device(device):
        main, side = torch.cuda.Stream(), torch.cuda.Stream()
        graphs = {
            (kind, number): _Repeated(partial(calls.run, kind, group), side if kind is Kind.W else main)
            for number, group in enumerate(groups)
            for kind in (Kind.F, Kind.X, Kind.W)
            if any(calls.of[kind, layer] for layer in group)
        }
        if update is not None:
            graphs[UPDATE] = _Repeated(update, side)
        pairs = feasible_pairs(list(graphs))
        slowdowns = {}
        for number, (one, other) in enumerate(pairs):
            progress(f"pair {number + 1} of {len(pairs)}", number / len(pairs))
            slowdowns[one, other] = _beside(graphs[one], graphs[other])
    return share_out(costs, groups, slowdowns)


def feasible_pairs(parts: Sequence[Part]) -> list[tuple[Part, Part]]:
    """Weight gradients and updates with what may run beside them.

    A weight gradient comes behind its own group, and before that group's next use.
    """
    return [
        (one, other)
        for one in parts
        for other in parts
        if (one[0] is Kind.U and other[0] in (Kind.F, Kind.X))
        or (one[0] is Kind.W and other[0] is Kind.X and other[1] <= one[1])
        or (one[0] is Kind.W and other[0] is Kind.F and other[1] < one[1])
    ]


def share_out(costs: Costs, groups: Sequence[range], slowdowns: dict[tuple[Part, Part], float]) -> Costs:
    """Gives every layer the shares of its group, which is a block from now on."""
    shares = fit_shares(slowdowns)
    layers = list(costs.layers)
    for number, group in enumerate(groups):
        of_kind = [shares.get((kind, number), 1.0) for kind in (Kind.F, Kind.X, Kind.W)]
        forward, input_grad, weight_grad, update = (
            Demand(share, share) for share in (*of_kind, shares.get(UPDATE, 1.0))
        )
        for layer in group:
            layers[layer] = replace(
                layers[layer],
                block=f"group {number}",
                forward_demand=forward,
                input_grad_demand=input_grad,
                weight_grad_demand=weight_grad,
                update_demand=update,
            )
    return replace(costs, layers=tuple(layers))


class _Repeated:
    """Operations as a CUDA graph that is replayed until it has taken a while.

    What is to run beside each other must be captured on different streams: matrix products of one stream
    share a workspace.

    Attributes:
        seconds: Of all repeats, alone.
    """

    def __init__(self, run: Callable[[], None], stream: torch.cuda.Stream) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._repeats = 1
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")  # operations that are views only
            with torch.cuda.graph(self._graph, stream=stream):
                run()
        self.replay()
        once = self._time()
        self._repeats = max(1, min(1000, round(_LEAST_SECONDS / max(once, 1e-6))))
        self.seconds = self._time()

    def replay(self) -> None:
        for _ in range(self._repeats):
            self._graph.replay()

    def _time(self) -> float:
        spent: list[float] = []
        for _ in range(_TURNS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            self.replay()
            end.record()
            end.synchronize()
            spent.append(begin.elapsed_time(end) / 1e3)
        return median(spent)


def _beside(one: _Repeated, other: _Repeated) -> float:
    """By what factor two groups slow each other down."""
    side = torch.cuda.Stream()
    spent = []
    for _ in range(_TURNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        side.wait_event(begin)
        with torch.cuda.stream(side):
            one.replay()
        other.replay()
        torch.cuda.current_stream().wait_stream(side)
        end.record()
        end.synchronize()
        spent.append(begin.elapsed_time(end) / 1e3)
    return slowdown(one.seconds, other.seconds, median(spent))
