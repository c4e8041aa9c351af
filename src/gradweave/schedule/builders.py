"""Task graphs for the four scenarios: one device, data parallel, pipeline, nodes of devices."""

from __future__ import annotations

from gradweave.errors import ArgumentError
from gradweave.schedule.costs import Costs
from gradweave.schedule.graph import Family, TaskGraph
from gradweave.schedule.links import Cluster, Link
from gradweave.schedule.tasks import Buffer, Demand, Kind, Task

DEVICE = "gpu0"
LINK = "link"


def single(costs: Costs, *, steps: int = 1, next_forward: bool = True) -> TaskGraph:
    """Return the graph of training on one device.

    Args:
        costs: The network.
        steps: Number of complete training steps.
        next_forward: Add the forward of one more step.
    """
    return _Builder(costs, Family.SINGLE, Cluster(), steps, 1, next_forward).graph()


def data_parallel(costs: Costs, *, replicas: int, link: Link, steps: int = 1, next_forward: bool = True) -> TaskGraph:
    """Return the graph of training on replicas that average their gradients over a link, one message per layer.

    All replicas do the same at the same time, so one of them stands for all.

    Args:
        costs: The network.
        replicas: Number of devices.
        link: Link that the all-reduces run over.
        steps: Number of complete training steps.
        next_forward: Add the forward of one more step.
    """
    if replicas < 1:
        raise ArgumentError("replicas", replicas, "give at least 1")
    return _Builder(costs, Family.DATA_PARALLEL, Cluster(replicas, link), steps, 1, next_forward).graph()


def hierarchical(
    costs: Costs,
    *,
    nodes: int,
    local_ranks: int,
    link: Link,
    local_link: Link = Link(),
    steps: int = 1,
    next_forward: bool = True,
) -> TaskGraph:
    """Return the graph of data-parallel training over nodes with fast links inside and slow ones between.

    As built, every gradient is averaged over all devices in every step; a policy may exchange less. One device stands
    for all. A single node uses its inner links only.

    Args:
        costs: The network.
        nodes: Number of nodes.
        local_ranks: Devices per node.
        link: Link between nodes.
        local_link: Link between the devices of a node.
        steps: Number of complete training steps.
        next_forward: Add the forward of one more step.
    """
    for argument, value in (("nodes", nodes), ("local_ranks", local_ranks)):
        if value < 1:
            raise ArgumentError(argument, value, "give at least 1")
    cluster = Cluster(nodes * local_ranks, local_link if nodes == 1 else link, nodes, local_link)
    return _Builder(costs, Family.HIERARCHICAL, cluster, steps, 1, next_forward).graph()


def pipeline(
    costs: Costs,
    *,
    stages: int,
    microbatches: int,
    link: Link = Link(),
    steps: int = 1,
    next_forward: bool = False,
) -> TaskGraph:
    """Return the graph of training on devices that hold different layers.

    The policy decides which device holds which layer; until then tasks have no resource, and the transfers between
    devices are not in the graph.

    Args:
        costs: The network.
        stages: Number of devices.
        microbatches: Micro-batches per step.
        link: Link between any two devices.
        steps: Number of complete training steps.
        next_forward: Add the forward of one more step.
    """
    if not 1 <= stages <= len(costs.layers):
        raise ArgumentError("stages", stages, f"give 1 to {len(costs.layers)}, at most one per layer")
    return _Builder(costs, Family.PIPELINE, Cluster(stages, link), steps, microbatches, next_forward).graph()


class _Builder:
    """Lists tasks in the order in which a framework would run them, which is topological.

    Attributes:
        updated: Updates of the step before, by layer; the next forward of a layer needs its own.
    """

    def __init__(
        self, costs: Costs, family: Family, cluster: Cluster, steps: int, microbatches: int, next_forward: bool
    ) -> None:
        for argument, value in (("steps", steps), ("microbatches", microbatches)):
            if value < 1:
                raise ArgumentError(argument, value, "give at least 1")
        self.costs = costs
        self.family = family
        self.cluster = cluster
        self.steps = steps
        self.microbatches = microbatches
        self.next_forward = next_forward
        self.device = "" if family is Family.PIPELINE else DEVICE
        self.tasks: list[Task] = []
        self.needs: list[tuple[int, ...]] = []
        self.buffers: list[Buffer] = []
        self.updated: list[int] = []

    def graph(self) -> TaskGraph:
        for step in range(self.steps):
            forwards = [self._forward(step, microbatch) for microbatch in range(self.microbatches)]
            backwards = [self._backward(step, mb, forward) for mb, forward in enumerate(forwards)]
            self._update(step, backwards)
        if self.next_forward:
            for microbatch in range(self.microbatches):
                forward = self._forward(self.steps, microbatch)
                for layer, task in enumerate(forward):
                    # Its backward is not in the graph: the inputs are held at least until the forward is done.
                    held = Buffer(self.costs.layers[layer].input_bytes, self.device, (forward[-1], task))
                    self.buffers.append(held)
        return TaskGraph(
            self.family, tuple(self.tasks), tuple(self.needs), tuple(self.buffers), self.costs, self.cluster,
            self.steps, self.microbatches, self.next_forward,
        )  # fmt: skip

    def _add(self, task: Task, needs: tuple[int, ...]) -> int:
        self.tasks.append(task)
        self.needs.append(needs)
        return len(self.tasks) - 1

    def _forward(self, step: int, microbatch: int) -> list[int]:
        """Add F of every layer; return their indices by layer."""
        added: list[int] = []
        for layer, cost in enumerate(self.costs.layers):
            needs = (*added[-1:], *self.updated[layer : layer + 1])
            task = Task(Kind.F, layer, cost.forward, self.device, microbatch, step,
                        demand=cost.forward_demand, payload=cost.output_bytes)  # fmt: skip
            added.append(self._add(task, needs))
        return added

    def _backward(self, step: int, microbatch: int, forward: list[int]) -> list[tuple[int, int]]:
        """Add X and W of every layer; return their indices by layer."""
        pairs: list[tuple[int, int]] = []
        above: tuple[int, ...] = ()
        for layer in reversed(range(len(self.costs.layers))):
            cost = self.costs.layers[layer]
            needs = (*above, forward[layer])
            w = self._add(
                Task(Kind.W, layer, cost.weight_grad, self.device, microbatch, step, demand=cost.weight_grad_demand),
                needs,
            )
            x = self._add(
                Task(Kind.X, layer, cost.input_grad, self.device, microbatch, step,
                     demand=cost.input_grad_demand, payload=cost.input_bytes),
                needs,
            )  # fmt: skip
            self.buffers.append(Buffer(cost.input_bytes, self.device, (forward[layer], w)))
            self.buffers.append(Buffer(cost.output_bytes, self.device, (*above, x, w)))
            above = (x,)
            pairs.append((x, w))
        return pairs[::-1]

    def _update(self, step: int, backwards: list[list[tuple[int, int]]]) -> None:
        """Add U of every layer, after its gradients from all micro-batches."""
        self.updated = []
        communicated = self._communicate(step, backwards)
        for layer, cost in enumerate(self.costs.layers):
            pairs = [backward[layer] for backward in backwards]
            final = communicated[layer : layer + 1] or [w for _, w in pairs]
            task = Task(Kind.U, layer, cost.update, self.device, 0, step, demand=cost.update_demand)
            # The input gradient is computed with the weights as they were: the update waits for X too.
            u = self._add(task, (*final, *(x for x, _ in pairs)))
            self.updated.append(u)
            gradient_users = (*(w for _, w in pairs), *communicated[layer : layer + 1], u)
            self.buffers.append(Buffer(cost.parameter_bytes, self.device, gradient_users))

    def _communicate(self, step: int, backwards: list[list[tuple[int, int]]]) -> list[int]:
        """Add one collective per layer where replicas must agree; return their indices by layer."""
        if self.family not in (Family.DATA_PARALLEL, Family.HIERARCHICAL):
            return []
        added = {}
        for layer in reversed(range(len(self.costs.layers))):
            size = self.costs.layers[layer].parameter_bytes
            seconds = self.cluster.link.all_reduce_seconds(size, self.cluster.devices)
            added[layer] = self._add(
                Task(Kind.C, layer, seconds, LINK, 0, step, demand=self._demand(size), payload=size),
                tuple(backward[layer][1] for backward in backwards),
            )
        return [added[layer] for layer in range(len(added))]

    def _demand(self, size: int) -> Demand:
        return self.cluster.link.all_reduce_demand(size, self.cluster.devices)
