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

from gradweave._compat.dispatch import EveryCall
from gradweave.profile.device_shares import equal_groups, fit_shares, slowdown
from gradweave.schedule.costs import Costs
from gradweave.schedule.tasks import Demand, Kind

MOST_GROUPS = 6
"""Groups of layers that are measured together: the pairs of them take a few seconds."""
_LEAST_SECONDS = 2e-3
"""For which a group is repeated: what two streams share is not seen in less than their launches take."""
_LEAST_OF_A_TASK = 2e-4
_MOST_REPEATS = 40
_TURNS = 5
_WARM_UPS = 3

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

    def seconds(self, device: torch.device, progress: Callable[[float], None]) -> dict[tuple[Kind, int], float]:
        """Of every task alone, replayed many times over in one CUDA graph: its work, and no launches from the host."""
        with torch.no_grad(), torch.cuda.device(device):
            stream, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
            found = {}
            for number, (kind, layer) in enumerate(list(self.of)):
                progress(number / len(self.of))
                run = partial(self.run, kind, [layer])
                found[kind, layer] = _Repeated(run, stream, least=_LEAST_OF_A_TASK, pool=pool)
        return {task: graph.seconds_of_one for task, graph in found.items()}

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

    Layers of a group also run one after the other as they do in a step, where they do not find what they read in
    the caches: costs are scaled to what that takes.

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
        costs = scale(costs, groups, {part: graph.seconds_of_one for part, graph in graphs.items()})
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


def scale(costs: Costs, groups: Sequence[range], together: dict[Part, float]) -> Costs:
    """Costs that sum up to what groups of layers, and the update of all of them, were measured to take together."""
    layers = list(costs.layers)
    for (kind, number), seconds in together.items():
        field = {Kind.F: "forward", Kind.X: "input_grad", Kind.W: "weight_grad", Kind.U: "update"}[kind]
        members = range(len(layers)) if kind is Kind.U else groups[number]
        apart = sum(getattr(layers[layer], field) for layer in members)
        for layer in members if apart else ():
            layers[layer] = replace(layers[layer], **{field: getattr(layers[layer], field) * seconds / apart})
    return replace(costs, layers=tuple(layers))


def scale_to(costs: Costs, seconds: float | None) -> Costs:
    """Costs whose forwards, input and weight gradients sum up to ``seconds``; as they are if that is None."""
    apart = sum(layer.forward + layer.input_grad + layer.weight_grad for layer in costs.layers)
    if seconds is None or not apart:
        return costs
    factor = seconds / apart
    layers = [
        replace(
            layer,
            forward=factor * layer.forward,
            input_grad=factor * layer.input_grad,
            weight_grad=factor * layer.weight_grad,
        )
        for layer in costs.layers
    ]
    return replace(costs, layers=tuple(layers))


def captured_seconds(run: Callable[[], None], device: torch.device) -> float | None:
    """Of forward and backward in a CUDA graph; None if they do what a graph cannot hold."""
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UPS):
                    run()
                with _waiting_refused():
                    run()
            return _Repeated(run, stream).seconds_of_one
        except RuntimeError:
            return None
        finally:
            torch.cuda.current_stream().wait_stream(stream)


@contextmanager
def _waiting_refused() -> Iterator[None]:
    """Context in which it is an error to wait for the device; a capture that fails of it damages the allocator."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


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
    """Operations, repeated until they take a while, as one CUDA graph.

    What is to run beside each other must be captured on different streams, since matrix products of one stream
    share a workspace, and without a ``pool``, so that neither writes to what the other uses.

    Attributes:
        seconds: Of all repeats, alone.
        seconds_of_one: Of one of them.
    """

    def __init__(
        self,
        run: Callable[[], None],
        stream: torch.cuda.Stream,
        *,
        least: float = _LEAST_SECONDS,
        pool: Any = None,
    ) -> None:
        self._graph = _captured(run, stream, 1, pool)
        repeats = max(1, min(_MOST_REPEATS, round(least / max(self._time(), 1e-6))))
        if repeats > 1:
            self._graph = _captured(run, stream, repeats, pool)
        self.seconds = self._time()
        self.seconds_of_one = self.seconds / repeats

    def replay(self) -> None:
        self._graph.replay()

    def _time(self) -> float:
        self.replay()
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


def _captured(run: Callable[[], None], stream: torch.cuda.Stream, repeats: int, pool: Any) -> torch.cuda.CUDAGraph:
    """A graph of repeated operations; unlike ``torch.cuda.graph`` it leaves the allocator's cache as it is."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")  # operations that are views only
        graph.capture_begin(pool=pool)
        try:
            for _ in range(repeats):
                run()
        finally:
            graph.capture_end()
    return graph


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
