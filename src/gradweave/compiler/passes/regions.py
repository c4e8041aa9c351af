"""The pass that cuts a slotted step into regions: what a lane runs without waiting for another one."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch.fx import Graph, GraphModule, Node

from gradweave.compiler.passes.slots import SlottedStep
from gradweave.step_graph.nodes import changed_by, is_mutable, memories_of


@dataclass(frozen=True, eq=False)
class Region:
    """Slots of one lane that follow each other, as one graph.

    Attributes:
        lane: Index of the lane.
        slots: Numbers of the slots.
        carried: Whether they are run for the step before.
        graph: Takes the inputs and returns the outputs.
        inputs: Nodes of the whole graph.
        outputs: Nodes of the whole graph that others use.
        after: Earlier regions of other lanes that it waits for; those that it follows anyway are left out.
    """

    lane: int
    slots: tuple[int, ...]
    carried: bool
    graph: GraphModule
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    after: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class RegionedStep:
    """A step in regions, in the order in which they are issued.

    Attributes:
        whole: The graph of the step.
        slotted: Its operations by slot.
        regions: All regions.
    """

    whole: GraphModule
    slotted: SlottedStep
    regions: tuple[Region, ...]


def cut(whole: GraphModule, slotted: SlottedStep, *, by_task: bool = False) -> RegionedStep:
    """Cut a step into as few regions as run as planned.

    A region ends behind a slot that another lane waits for, and before one that waits for another lane.

    Args:
        whole: The graph of the step.
        slotted: Its operations by slot.
        by_task: Whether every slot is a region of its own, as for measurements.
    """
    waits = _waits(slotted)
    groups = _groups(slotted, waits, by_task=by_task)
    region_of = {slot: number for number, slots in enumerate(groups) for slot in slots}
    parts = [[node for slot in slots for node in slotted.operations[slot]] for slots in groups]
    slots_of = slotted.call.slots
    regions = []
    for slots, nodes in zip(groups, parts, strict=True):
        inputs, outputs = _border(nodes)
        lane = slots_of[slots[0]].lane
        after = {region_of[earlier] for earlier in waits[slots[0]]}
        graph = _graph_of(whole, nodes, inputs, outputs)
        regions.append(Region(lane, slots, slots_of[slots[0]].carried, graph, inputs, outputs, tuple(sorted(after))))
    return RegionedStep(whole, slotted, tuple(regions))


def _groups(slotted: SlottedStep, waits: Sequence[set[int]], *, by_task: bool) -> list[tuple[int, ...]]:
    """Return the slots of every region, by their first slot: no other one waits for another lane."""
    slots = slotted.call.slots
    awaited = {earlier for others in waits for earlier in others}
    groups: list[list[int]] = []
    open_group: dict[int, list[int]] = {}
    for number, slot in enumerate(slots):
        group = open_group.get(slot.lane)
        if group is None or by_task or waits[number] or slots[group[0]].carried != slot.carried:
            group = open_group[slot.lane] = []
            groups.append(group)
        group.append(number)
        if number in awaited:
            del open_group[slot.lane]
    return [tuple(group) for group in groups]


def _waits(slotted: SlottedStep) -> list[set[int]]:
    """Return, for each slot, the slots of other lanes that it must wait for: not those that it follows anyway."""
    slots = slotted.call.slots
    last: dict[int, int] = {}
    behind: list[set[int]] = []
    waits: list[set[int]] = []
    for number, slot in enumerate(slots):
        known = set(behind[last[slot.lane]]) if slot.lane in last else set()
        others = {earlier for earlier in slotted.after[number] if slots[earlier].lane != slot.lane}
        needed = set()
        for earlier in sorted(others, reverse=True):  # the last of a lane has the others behind it
            if earlier not in known:
                needed.add(earlier)
                known |= behind[earlier]
        waits.append(needed)
        behind.append(known | {number})
        last[slot.lane] = number
    return waits


def _border(nodes: Sequence[Node]) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
    """Return what some operations take from elsewhere, and what others take from them."""
    inside = set(nodes)
    inputs = tuple(dict.fromkeys(used for node in nodes for used in node.all_input_nodes if used not in inside))
    outputs = tuple(node for node in nodes if any(user not in inside for user in node.users))
    return inputs, outputs


def _graph_of(
    whole: GraphModule, nodes: Sequence[Node], inputs: Sequence[Node], outputs: Sequence[Node]
) -> GraphModule:
    graph = Graph()
    copies = {node: graph.placeholder(node.name) for node in inputs}
    for node, copy in copies.items():
        copy.meta = dict(node.meta)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    return GraphModule(whole, graph)


def with_own_views(step: RegionedStep) -> RegionedStep | None:
    """Return a step whose regions make the views of the graph's inputs that they use; None if there can be none.

    A compiler takes two inputs for two tensors: if a region got both an input and a view of it, a write to one would
    not be seen in the other. Nor may a region change what another one has made.
    """
    whole = step.whole
    nodes = [node for node in whole.graph.nodes if node.op in ("call_function", "get_attr")]
    given = {node for node in whole.graph.nodes if node.op == "placeholder"}
    own = memories_of(given)
    views = [node for node in nodes if not is_mutable(node) and memories_of([node]) & own]
    changed = {memory for node in nodes for memory in memories_of(changed_by(node))}
    place = {node: number for number, node in enumerate(nodes)}
    parts = [{node for slot in region.slots for node in step.slotted.operations[slot]} for region in step.regions]
    full = [_with_views(part, views) for part in parts]
    needed = [{used for node in part for used in node.all_input_nodes if used not in part} - given for part in full]
    crossing = set().union(*needed)
    if any(is_mutable(node) or memories_of([node]) & changed for node in crossing):
        return None
    returned = {*whole.graph.output_node().all_input_nodes, *crossing}
    regions = []
    for region, part, more in zip(step.regions, parts, full, strict=True):
        ordered = sorted(more, key=place.__getitem__)
        inputs, _ = _border(ordered)
        outputs = tuple(node for node in ordered if node in part and node in returned)
        graph = _graph_of(whole, ordered, inputs, outputs)
        regions.append(Region(region.lane, region.slots, region.carried, graph, inputs, outputs, region.after))
    return RegionedStep(whole, step.slotted, tuple(regions))


def _with_views(part: Collection[Node], views: Sequence[Node]) -> set[Node]:
    """Return a part with the views that it uses, and the views that these are of."""
    more = set(part)
    for view in reversed(views):
        if any(user in more for user in view.users):
            more.add(view)
    return more
