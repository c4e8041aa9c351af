"""Rewrites of task graphs that policies choose: layers placed on devices, messages merged into buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from gradweave.errors import ArgumentError
from gradweave.schedule.buckets import message_buckets
from gradweave.schedule.graph import TaskGraph
from gradweave.schedule.tasks import Buffer, Kind, Task


def device_name(number: int) -> str:
    """Return the name of a pipeline's device."""
    return f"gpu{number}"


def place(graph: TaskGraph, device_of: Callable[[int], int]) -> TaskGraph:
    """Put each layer of a pipeline on a device and add the transfers that this makes necessary.

    A result that several tasks of one device need is sent there once. Transfers over a free link are left out. The
    seconds that a message takes of the devices themselves are added to the task that makes it and to the first that
    needs it.

    Args:
        graph: An unplaced pipeline graph.
        device_of: Maps a layer to its device.
    """
    placement = [device_of(layer) for layer in range(graph.layers)]
    names = [device_name(number) for number in range(graph.cluster.devices)]
    placed = [replace(task, resource=names[placement[task.layer]]) for task in graph.tasks]
    # A buffer's last user is a task of the layer that the buffer belongs to.
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
    """Copies a placed graph task by task, with a transfer wherever a result crosses devices.

    Attributes:
        moved: Index in the copy of each task of the original.
        sent: Transfer of a task's result to a device, by (task, device).
        received: Bytes that the task being added is the first on its device to need.
    """

    def __init__(self, graph: TaskGraph, placement: list[int]) -> None:
        self.graph = graph
        self.placement = placement
        self.tasks: list[Task] = []
        self.needs: list[tuple[int, ...]] = []
        self.moved: list[int] = []
        self.sent: dict[tuple[int, int], int] = {}
        self.received = 0

    def add(self, task: Task, needs: tuple[int, ...]) -> None:
        """Add a task after the transfers it needs."""
        self.received = 0
        delivered = tuple(self._delivered(need, self.placement[task.layer]) for need in needs)
        self.moved.append(len(self.tasks))
        self.tasks.append(self._burdened(task, self.received))
        self.needs.append(delivered)

    def _delivered(self, producer: int, target: int) -> int:
        """Return the task after which the target device has the producer's result: the producer, or a transfer."""
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
        """Return a task that takes longer because its device sends or receives so many bytes."""
        burden = self.graph.cluster.link.device_seconds * size
        return replace(task, seconds=task.seconds + burden) if burden else task

    def moved_buffer(self, buffer: Buffer, device: str, owner: int) -> Buffer:
        """Return a buffer of the owner; results of other devices reach it with their transfers."""
        users = tuple([self.sent.get((user, owner), self.moved[user]) for user in buffer.users])
        return Buffer(buffer.size, device, users)


def contiguous(layers: int, devices: int) -> Callable[[int], int]:
    """Return a placement of equal runs of layers; the first devices take one more each where there is a remainder."""
    small, extra = divmod(layers, devices)
    return lambda layer: layer // (small + 1) if layer < extra * (small + 1) else (layer - extra) // small


def bucket(graph: TaskGraph, bucket_bytes: int, *, k: int = 0) -> TaskGraph:
    """Merge the per-layer messages of each step by :func:`~gradweave.schedule.buckets.message_buckets`.

    Args:
        graph: A graph with one message per layer.
        bucket_bytes: Size that closes a message; 0 keeps one message per layer.
        k: Number of first layers held back to the end of backward, and sent in the order of the forward.
    """
    if bucket_bytes < 0:
        raise ArgumentError("bucket_bytes", bucket_bytes, "give 0 (one message per layer) or more")
    sizes = [layer.parameter_bytes for layer in graph.costs.layers]
    return merge_messages(graph, message_buckets(range(graph.layers), k, sizes.__getitem__, bucket_bytes))


def merge_messages(graph: TaskGraph, members: Sequence[Sequence[int]]) -> TaskGraph:
    """Merge the per-layer messages of each step.

    Args:
        graph: A graph with one message per layer.
        members: The layers of each message, neighbours of each other.
    """
    bucket_of = {layer: number for number, layers in enumerate(members) for layer in layers}
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
        bucketed = collected.setdefault((task.step, number), [])
        bucketed.append(i)
        if len(bucketed) == len(members[number]):
            size = sum(graph.tasks[member].payload for member in bucketed)
            seconds = cluster.link.all_reduce_seconds(size, cluster.devices)
            merged = replace(
                task, layer=min(members[number]), layers=len(bucketed), payload=size, seconds=seconds,
                demand=cluster.link.all_reduce_demand(size, cluster.devices),
            )  # fmt: skip
            for member in bucketed:
                moved[member] = len(tasks)
            tasks.append(merged)
            needs.append(tuple(sorted({moved[need] for member in bucketed for need in graph.needs[member]})))
    buffers = tuple(
        replace(buffer, users=tuple(dict.fromkeys(moved[user] for user in buffer.users))) for buffer in graph.buffers
    )
    return replace(graph, tasks=tuple(tasks), needs=tuple(needs), buffers=buffers)
