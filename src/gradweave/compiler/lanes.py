"""Running a step in regions: on a CPU one after the other, on a GPU each lane on a stream of its own."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from gradweave.compiler.passes.regions import Region, RegionedStep
from gradweave.compiler.passes.slots import SlottedStep
from gradweave.schedule.tasks import Kind, Task
from gradweave.schedule.timeline import Span, Timeline


class RegionRun(NamedTuple):
    """One run of a region.

    Attributes:
        slotted: The step that it is of.
        region: The region.
        begin: Moment at which it began, of the clock that noted it.
        end: Moment at which it was over.
    """

    slotted: SlottedStep
    region: Region
    begin: Any
    end: Any


Lower = Callable[[GraphModule, list[Any]], Callable[..., Any]]
"""Makes a region's graph callable, given examples of its inputs."""


class Carried:
    """What a call has left to the next one.

    Attributes:
        values: By node, what carried operations take; None if nothing is left.
        done: What of it has been done, where an error has come in between: operations, or regions that are compiled.
    """

    def __init__(self) -> None:
        self.values: dict[Node, Any] | None = None
        self.done: set[Node | Region] = set()

    def leave(self, values: dict[Node, Any]) -> None:
        """Leave work to the next call."""
        self.values, self.done = values, set()

    def references(self) -> Counter[int]:
        """Return how often each object is referred to here, by its id."""
        return Counter(map(id, (self.values or {}).values()))

    def clear(self) -> None:
        """Note that all of it is done."""
        self.values, self.done = None, set()


class RegionRunner:
    """Runs the regions of a step; called like the graph of the whole step, with flat inputs.

    Args:
        step: The regions.
        lower: Makes their graphs callable.
        examples: Inputs of the whole graph; None if ``lower`` needs none.
        carried: What calls leave to each other; runners of one step share it.
    """

    def __init__(
        self, step: RegionedStep, lower: Lower, examples: Sequence[Any] | None, carried: Carried | None = None
    ) -> None:
        graph = step.whole.graph
        self.step = step
        self.carried = Carried() if carried is None else carried
        self._given = [node for node in graph.nodes if node.op == "placeholder"]
        self._returned = graph.output_node().args[0]
        known = dict(zip(self._given, examples, strict=True)) if examples is not None else None
        self._run_of = {
            region: lower(region.graph, [] if known is None else [_example(node, known) for node in region.inputs])
            for region in step.regions
        }
        self._now = [region for region in step.regions if not region.carried]
        self._later = [region for region in step.regions if region.carried]
        self._dead_after = self._plan_release()
        self._lane_of = {node: region.lane for region in step.regions for node in region.outputs}
        self._awaited = {step.regions[number] for region in step.regions for number in region.after}
        lane_of = [slot.lane for slot in step.slotted.call.slots if slot.task.kind is Kind.F]
        self._main = lane_of[0] if lane_of else step.regions[0].lane
        self._streams: dict[int, torch.cuda.Stream] = {}
        inner = {node for region in self._later for node in region.outputs}
        self._left = {node for region in self._later for node in region.inputs} - inner
        # One operation at a time, so that an error in between loses none of them and does none twice; a compiled region
        # is one operation.
        self._by_operation = examples is None
        self._operations = {
            region: tuple(node for number in region.slots for node in step.slotted.operations[number])
            for region in self._later
        }
        self._last_uses = _last_uses([node for region in self._later for node in self._operations[region]])

    def _plan_release(self) -> dict[Region, tuple[Node, ...]]:
        """Return, for each region, the values that nothing needs after it."""
        taken = {node for region in self._later for node in region.inputs}
        lasting = {*self._given, *taken, *(value for value in self._returned if isinstance(value, Node))}  # type: ignore[union-attr]
        dead: dict[Region, list[Node]] = defaultdict(list)
        for regions, kept in ((self._now, lasting), (self._later, set[Node]())):
            last: dict[Node, Region] = {}
            for region in regions:
                last.update(dict.fromkeys((*region.outputs, *region.inputs), region))
            for node, region in last.items():
                if node not in kept:
                    dead[region].append(node)
        return {region: tuple(nodes) for region, nodes in dead.items()}

    def __call__(self, *given: Any, clock: Clock | None = None) -> list[Any]:
        """Take a step, with what the step before has left; return the outputs of the whole graph."""
        values = dict(zip(self._given, given, strict=True))
        is_due = self.carried.values is not None
        try:
            self._run(self.step.regions if is_due else self._now, values, clock)
        except BaseException as error:
            # This step fails; the one before has been taken, and what is left of it must not be lost with this one.
            if is_due:
                self._finish_after(error)
            raise
        outputs = [values[value] if isinstance(value, Node) else value for value in self._returned]  # type: ignore[union-attr]
        self.carried.clear()
        if self._later:
            kept = self.step.slotted.kept
            self.carried.leave({node: values[node].clone() if node in kept else values[node] for node in self._left})
        return outputs

    def flush(self, clock: Clock | None = None) -> None:
        """Run what the last call has left; what an error keeps from being run is left still."""
        if self.carried.values is not None:
            self._run(self._later, {}, clock)
            self.carried.clear()

    def _finish_after(self, error: BaseException) -> None:
        try:
            self.flush()
        except Exception as another:  # any: what remains is left, and the next look at a weight tries again
            error.add_note(f"gradweave: updates of the step before are still left to do: {another}")

    def _run(self, regions: Sequence[Region], values: dict[Node, Any], clock: Clock | None) -> None:
        before = self.carried.values or {}
        example = next((x for x in (*values.values(), *before.values()) if isinstance(x, torch.Tensor)), None)
        if example is None:
            return
        lanes = _Streams(example.device, self._main, self._streams) if example.device.type == "cuda" else None
        numbers = {region: number for number, region in enumerate(self.step.regions)}
        for region in regions:
            if region in self.carried.done:
                continue
            scope = before if region.carried else values
            with nullcontext() if lanes is None else lanes.enter(region):
                begin = clock.now() if clock is not None else None
                if lanes is not None:
                    own = [node for node in region.inputs if node in scope and self._is_from_elsewhere(node, region)]
                    lanes.keep(region, [scope[node] for node in own])
                if region.carried and self._by_operation:
                    self._run_operations(region, scope)
                else:
                    self._run_whole(region, scope)
                if clock is not None:
                    clock.note(RegionRun(self.step.slotted, region, begin, clock.now()))
                if lanes is not None:
                    lanes.leave(region, numbers[region], is_awaited=region in self._awaited)
        if lanes is not None:
            lanes.join()

    def _run_whole(self, region: Region, scope: dict[Node, Any]) -> None:
        if region.carried:
            self.carried.done.add(region)  # first: what fails half-way may have changed weights
        made = self._run_of[region](*(scope[node] for node in region.inputs))
        scope.update(zip(region.outputs, made, strict=True))
        for node in self._dead_after.get(region, ()):
            del scope[node]

    def _run_operations(self, region: Region, scope: dict[Node, Any]) -> None:
        done = self.carried.done
        for node in self._operations[region]:
            if node in done:
                continue
            if node.op == "get_attr":
                scope[node] = attrgetter(str(node.target))(self.step.whole)
            else:
                args: Any = map_arg(node.args, scope.__getitem__)
                named: Any = map_arg(node.kwargs, scope.__getitem__)
                scope[node] = node.target(*args, **named)  # type: ignore[operator]
            done.add(node)
            for dead in self._last_uses.get(node, ()):
                scope.pop(dead, None)

    def _is_from_elsewhere(self, node: Node, region: Region) -> bool:
        return node in self._lane_of and self._lane_of[node] != region.lane


class Clock:
    """Notes when regions run, by the host's clock, or by events of the streams that they run on.

    Attributes:
        runs: Of all regions since it was made.
    """

    def __init__(self, device: torch.device) -> None:
        self.runs: list[RegionRun] = []
        self._device = device
        self._first = self.now()

    def now(self) -> Any:
        """Return this moment of the current stream."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def note(self, run: RegionRun) -> None:
        """Note a run."""
        self.runs.append(run)

    def seconds(self) -> list[tuple[Region, float, float]]:
        """Return the runs with the seconds from the clock's beginning to theirs and to their end."""
        if self._device.type != "cuda":
            return [(run.region, run.begin - self._first, run.end - self._first) for run in self.runs]
        torch.cuda.synchronize(self._device)
        return [
            (run.region, self._first.elapsed_time(run.begin) / 1e3, self._first.elapsed_time(run.end) / 1e3)
            for run in self.runs
        ]


def timeline_of(clock: Clock) -> Timeline:
    """Return what ran when, of a measured step.

    A region of several tasks is one span, named after its first task. The step's own tasks are those of the last
    complete step of its schedule.
    """
    runs = clock.seconds()
    schedule = clock.runs[0].slotted.call.schedule
    slots = clock.runs[0].slotted.call.slots
    index, last = schedule.graph.index, schedule.graph.steps - 1
    spans = []
    for region, begin, end in runs:
        task = _task_of([slots[number].task for number in region.slots], last - region.carried)
        number = index.get((task.kind, task.layer, 0, task.step), -1)
        spans.append(Span(schedule.lanes[region.lane].name, begin, end, task, number))
    lanes = tuple((lane.name, lane.resource) for lane in schedule.lanes)
    return Timeline(tuple(sorted(spans, key=lambda span: span.start)), lanes, title=f"{schedule.policy}, measured")


def _task_of(tasks: Sequence[Task], step: int) -> Task:
    """Return a task that stands for those of a region."""
    layers = [task.layer for task in tasks]
    kinds = "".join(dict.fromkeys(task.kind for task in tasks))
    first = tasks[0]
    note = f"to {tasks[-1].kind}{tasks[-1].layer}, of {kinds}" if len(tasks) > 1 else ""
    low = first.layer if len(tasks) == 1 else min(layers)
    count = 1 if len(tasks) == 1 else max(layers) - low + 1
    return replace(first, step=step, layer=low, layers=count, note=note)


class _Streams:
    """The streams of a call on a GPU: the current one for the main lane, and one for each other lane.

    A call forks from the current stream and joins it again, so that it is one piece of work to its caller, and to a
    capture, which may not end while another stream is part of it.
    """

    def __init__(self, device: torch.device, main: int, streams: dict[int, torch.cuda.Stream]) -> None:
        self._device = device
        self._current = torch.cuda.current_stream(device)
        self._main = main
        self._others = streams
        self._forked: dict[int, torch.cuda.Stream] = {}
        self._begin: Any = self._current.record_event()
        self._events: dict[int, Any] = {}
        self._lane_of: dict[int, int] = {}

    def enter(self, region: Region) -> AbstractContextManager[Any]:
        """Return a context in which a region's work goes to its stream, behind all that it waits for."""
        stream = self._stream_of(region.lane)
        for number in region.after:
            # A region that did not run in this call ran in an earlier one, which has joined.
            if number in self._events:
                stream.wait_event(self._events[number])
        return torch.cuda.stream(stream)

    def _stream_of(self, lane: int) -> torch.cuda.Stream:
        if lane == self._main:
            return self._current
        if lane not in self._forked:
            if lane not in self._others:
                self._others[lane] = torch.cuda.Stream(self._device)
            self._forked[lane] = self._others[lane]
            self._forked[lane].wait_event(self._begin)
        return self._forked[lane]

    def keep(self, region: Region, values: Sequence[Any]) -> None:
        """Keep the memory of what a region reads of other lanes from being reused before it has run.

        The host drops its references before the device has run. Memory goes back to the stream that it was allocated
        on, which would reuse it at once.
        """
        stream = self._stream_of(region.lane)
        for value in values:
            if isinstance(value, torch.Tensor):
                value.record_stream(stream)

    def leave(self, region: Region, number: int, *, is_awaited: bool) -> None:
        """Record the end of a region on its stream."""
        if is_awaited:
            self._events[number] = self._stream_of(region.lane).record_event()

    def join(self) -> None:
        """Make the current stream wait for all others."""
        for stream in self._forked.values():
            self._current.wait_event(stream.record_event())


def _last_uses(operations: Sequence[Node]) -> dict[Node, tuple[Node, ...]]:
    """Return, for each operation, the values that none of those after it takes."""
    last: dict[Node, Node] = {}
    for node in operations:
        last[node] = node
        last.update(dict.fromkeys(node.all_input_nodes, node))
    dead: dict[Node, list[Node]] = defaultdict(list)
    for value, node in last.items():
        dead[node].append(value)
    return {node: tuple(values) for node, values in dead.items()}


def _example(node: Node, known: dict[Node, Any]) -> Any:
    """Return an example of a value: an input of the graph, or a tensor of the shape and layout of a result."""
    if node in known:
        return known[node]
    value = node.meta["val"]
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
