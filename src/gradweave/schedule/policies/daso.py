"""DASO (Coquelin et al. 2021): averaging inside nodes in every step, between nodes every few steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from gradweave.errors import ArgumentError
from gradweave.schedule.builders import DEVICE
from gradweave.schedule.graph import TaskGraph
from gradweave.schedule.list_scheduling import link_lanes
from gradweave.schedule.policies.one_device import MAIN, backward, forward, stream, updates
from gradweave.schedule.schedule import Schedule
from gradweave.schedule.tasks import Buffer, Kind, Task

Payload = Literal["float32", "bfloat16", "float16"]

LOCAL_LINK = "local link"
GLOBAL_LINK = "global link"
_BYTES: dict[Payload, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


def daso(graph: TaskGraph, *, every: int = 4, wait: int = 1, payload: Payload = "float32") -> Schedule:
    """Average gradients inside nodes, and weights between nodes every few steps, merged ``wait`` later.

    One device of each node exchanges the weights, in the background; the merge itself is one pass over them and counts
    as free. Exchanges due after the last step shown are not merged. A single node has nothing to exchange.

    Args:
        graph: A graph of nodes of devices.
        every: Steps from one exchange to the next.
        wait: Steps that an exchange may take before a step waits for it; at most ``every``, since one is under way at a
            time.
        payload: Type of the weights on their way.
    """
    if payload not in _BYTES:
        raise ArgumentError("payload", payload, f"use one of {', '.join(_BYTES)}")
    if every < 1:
        raise ArgumentError("every", every, "give at least 1 step")
    if wait < 0:
        raise ArgumentError("wait", wait, "give 0 steps or more")
    if wait > every:
        raise ArgumentError("wait", wait, f"give at most every={every}: one exchange is under way at a time")
    if graph.steps < wait + 2 * every:
        raise ArgumentError("steps", graph.steps, f"give at least {wait + 2 * every}, for the exchanges to recur")
    graph, merges = _exchange(graph, every, wait, _BYTES[payload])
    order: list[int] = []
    for step in range(graph.steps):
        order += forward(graph, step) + backward(graph, step) + updates(graph, step) + merges.get(step, [])
    order += forward(graph, graph.steps)
    options = {"every": every, "wait": wait} | ({"payload": payload} if payload != "float32" else {})
    return Schedule(graph, (stream(MAIN, order), *link_lanes(graph)), policy="daso", options=options)


def _exchange(graph: TaskGraph, every: int, wait: int, width: int) -> tuple[TaskGraph, dict[int, list[int]]]:
    """Return the graph with local collectives, exchanges and merges, and the merges at the end of each step."""
    cluster, size = graph.cluster, graph.costs.parameter_bytes * width // 4
    seconds = cluster.link.all_reduce_seconds(size, cluster.nodes)
    tasks: list[Task] = []
    needs: list[tuple[int, ...]] = []
    moved: list[int] = []
    merges: dict[int, list[int]] = {}
    sent: dict[int, int] = {}
    buffers: list[Buffer] = []
    last_update = graph.layers - 1

    def add(task: Task, task_needs: tuple[int, ...]) -> int:
        tasks.append(task)
        needs.append(task_needs)
        return len(tasks) - 1

    for task, task_needs in zip(graph.tasks, graph.needs, strict=True):
        renamed = tuple(moved[need] for need in task_needs)
        if task.kind is Kind.C:
            local = cluster.local_link.all_reduce_seconds(task.payload, cluster.local_ranks)
            task = replace(task, resource=LOCAL_LINK, seconds=local)
        elif task.kind is Kind.F:
            renamed = (*renamed, *merges.get(task.step - 1, ()))
        moved.append(add(task, renamed))
        if task.kind is not Kind.U or task.layer != last_update:
            continue
        updated = tuple(moved[-graph.layers :])
        if task.step % every == 0 and cluster.nodes > 1:
            exchange = Task(Kind.C, 0, seconds, GLOBAL_LINK, 0, task.step, graph.layers, payload=size, note="exchange")
            sent[task.step] = add(exchange, updated)
        for step in [s for s in sent if s + wait <= task.step]:
            merge = Task(Kind.U, 0, 0.0, DEVICE, 0, task.step, graph.layers, note=f"merge of step {step}")
            merged = add(merge, (sent[step], *updated))
            merges.setdefault(task.step, []).append(merged)
            buffers.append(Buffer(size, DEVICE, (sent.pop(step), merged)))
    buffers += [Buffer(size, DEVICE, (exchange,)) for exchange in sent.values()]
    kept = [replace(buffer, users=tuple(moved[user] for user in buffer.users)) for buffer in graph.buffers]
    rewritten = replace(graph, tasks=tuple(tasks), needs=tuple(needs), buffers=(*kept, *buffers), period=every)
    return rewritten, merges
