"""Rewrites of task graphs that policies choose: layers placed on devices, messages put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from gradweave.errors import ArgumentError
from gradweave.schedule.graph import TaskGraph
from gradweave.schedule.tasks import Buffer, Kind, Task


def device_name(number: int) -> str:
    """Name of a pipeline's device."""
    return f"gpu{number}"


def place(graph: TaskGraph, device_of: Callable[[int], int]) -> TaskGraph:
    """Puts each layer of a pipeline on a device and adds the transfers this makes necessary.

    What one task sends to several tasks of one device is sent once. Transfers over a free link
    are left out. What a message takes of the devices themselves is added to the task that makes it
    and to the first that needs it.
    """
    placement = [device_of(layer) for layer in range(graph.layers)]
    names = [device_name(number) for number in range(graph.cluster.devices)]
    placed = [_on(task, names[placement[task.layer]]) for task in graph.tasks]
    owner = [placement[graph.tasks[buffer.users[-1]].layer] for buffer in graph.buffers]
    if graph.cluster.link.free:
        buffers = tuple([Buffer(b.size, names[o], b.users) for b, o in zip(graph.buffers, owner, strict=True)])
        return replace(graph, tasks=tuple(placed), buffers=buffers)
    transfers = _Transfers(graph, placement)
    for task, needs in zip(placed, graph.needs, strict=True):
        transfers.add(task, needs)
    return replace(
        graph,
        tasks=tuple(transfers.tasks),
        needs=tuple(transfers.needs),
        buffers=tuple([transfers.moved_buffer(b, names[o], o) for b, o in zip(graph.buffers, owner, strict=True)]),
    )


class _Transfers:
    """Copies a placed graph task by task, with a transfer wherever a result crosses devices."""

    def __init__(self, graph: TaskGraph, placement: list[int]) -> None:
        self.graph = graph
        self.placement = placement
        self.tasks: list[Task] = []
        self.needs: list[tuple[int, ...]] = []
        self.moved: list[int] = []
        self.sent: dict[tuple[int, int], int] = {}
        self.received = 0

    def add(self, task: Task, needs: tuple[int, ...]) -> None:
        """Adds a task after the transfers it needs."""
        self.received = 0
        delivered = tuple(self._delivered(need, self.placement[task.layer]) for need in needs)
        self.moved.append(len(self.tasks))
        self.tasks.append(self._burdened(task, self.received))
        self.needs.append(delivered)

    def _delivered(self, producer: int, target: int) -> int:
        """The task after which the target device has what the producer made: itself, or a transfer."""
        made = self.graph.tasks[producer]
        source = self.placement[made.layer]
        if source == target:
            return self.moved[producer]
        key = (producer, target)
        if key not in self.sent:
            self.sent[key] = len(self.tasks)
            sender = self.moved[producer]
            self.tasks[sender] = self._burdened(self.tasks[sender], made.payload)
            self.received += made.payload
            seconds = self.graph.cluster.link.transfer_seconds(made.payload)
            self.tasks.append(
                Task(Kind.C, made.layer, seconds, f"link {source}>{target}", made.microbatch, made.step,
                     payload=made.payload, note=f"after {made.kind}")
            )  # fmt: skip
            self.needs.append((self.moved[producer],))
        return self.sent[key]

    def _burdened(self, task: Task, size: int) -> Task:
        """A task that takes longer because its device sends or receives so many bytes."""
        burden = self.graph.cluster.link.device_seconds * size
        return replace(task, seconds=task.seconds + burden) if burden else task

    def moved_buffer(self, buffer: Buffer, device: str, owner: int) -> Buffer:
        """A buffer of the owner; what another device makes of it arrives with the transfer."""
        users = tuple([self.sent.get((user, owner), self.moved[user]) for user in buffer.users])
        return Buffer(buffer.size, device, users)


def _on(task: Task, resource: str) -> Task:
    return Task(task.kind, task.layer, task.seconds, resource, task.microbatch, task.step,
                task.layers, task.demand, task.payload, task.note)  # fmt: skip


def contiguous(layers: int, devices: int) -> Callable[[int], int]:
    """Placement of equal runs of layers; the first devices take one more where it does not divide."""
    small, extra = divmod(layers, devices)
    return lambda layer: layer // (small + 1) if layer < extra * (small + 1) else (layer - extra) // small


def bucket(graph: TaskGraph, order: Sequence[int], bucket_bytes: int) -> TaskGraph:
    """Puts the per-layer messages of each step together, following ``order`` of layers.

    A message is closed once it holds ``bucket_bytes`` or more, or where the next layer of the
    order does not border on it; 0 keeps one message per layer.
    """
    if bucket_bytes < 0:
        raise ArgumentError("bucket_bytes", bucket_bytes, "give 0 (one message per layer) or more")
    bucket_of = _bucket_layers(graph, order, bucket_bytes)
    members: dict[int, list[int]] = {}
    for layer, number in bucket_of.items():
        members.setdefault(number, []).append(layer)
    cluster = graph.cluster
    tasks: list[Task] = []
    needs: list[tuple[int, ...]] = []
    moved: dict[int, int] = {}
    collected: dict[tuple[int, int], list[int]] = {}
    for i, (task, task_needs) in enumerate(zip(graph.tasks, graph.needs, strict=True)):
        if task.kind is not Kind.C:
            moved[i] = len(tasks)
            tasks.append(task)
            needs.append(tuple(dict.fromkeys(moved[need] for need in task_needs)))
            continue
        number = bucket_of[task.layer]
        together = collected.setdefault((task.step, number), [])
        together.append(i)
        if len(together) == len(members[number]):
            size = sum(graph.tasks[member].payload for member in together)
            seconds = cluster.link.all_reduce_seconds(size, cluster.devices)
            merged = replace(
                task, layer=min(members[number]), layers=len(together), payload=size, seconds=seconds,
                demand=cluster.link.all_reduce_demand(size, cluster.devices),
            )  # fmt: skip
            for member in together:
                moved[member] = len(tasks)
            tasks.append(merged)
            needs.append(tuple(sorted({moved[need] for member in together for need in graph.needs[member]})))
    buffers = tuple(
        replace(buffer, users=tuple(dict.fromkeys(moved[user] for user in buffer.users))) for buffer in graph.buffers
    )
    return replace(graph, tasks=tuple(tasks), needs=tuple(needs), buffers=buffers)


def _bucket_layers(graph: TaskGraph, order: Sequence[int], bucket_bytes: int) -> dict[int, int]:
    """Number of the bucket that each layer falls into."""
    bucket_of: dict[int, int] = {}
    number, size, last = 0, 0, order[0]
    for layer in order:
        if bucket_of and (size >= bucket_bytes or abs(layer - last) > 1):
            number, size = number + 1, 0
        bucket_of[layer] = number
        size += graph.costs.layers[layer].parameter_bytes
        last = layer
    return bucket_of
