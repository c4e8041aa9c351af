"""The pass that gives every operation of a traced step its place in a schedule's order.

A schedule orders tasks, each of which is many operations of the graph. The tasks' dependencies are those of a network
of layers in a row; a real step may have others, such as a norm over all gradients or a weight of two layers. So what an
operation really needs, and the memory that it reads and writes, are checked one by one: a schedule is carried out as it
is, or refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import NamedTuple

import torch
from torch.fx import Graph, Node

from gradweave._compat.distributed import finishes_sum, starts_sum
from gradweave.errors import UnsupportedError
from gradweave.schedule.calls import StepCall
from gradweave.schedule.tasks import Kind
from gradweave.step_graph.nodes import changed_by, extent_of, memories_of
from gradweave.step_graph.tasks import Place

_PLACE = "gradweave_place"
_LINK, _RANDOM = -2, -1
"""Stand among the identities of memory for the order of messages, which ranks match them by, and for the state of the
random number generators."""


@dataclass(frozen=True, eq=False)
class SlottedStep:
    """A step's operations by the slots of a call.

    Attributes:
        call: What a call runs.
        operations: Of each slot, in the order in which they run.
        after: For each slot, the earlier ones of the same call that it must follow: since it needs what they compute,
            touches memory that they touch, or is to wait for them.
        kept: What carried slots read and a loop may have changed by the next call: inputs of the graph, and what is
            returned.
    """

    call: StepCall
    operations: tuple[tuple[Node, ...], ...]
    after: tuple[frozenset[int], ...]
    kept: frozenset[Node]


def slot_operations(
    graph: Graph,
    places: Mapping[Node, Place],
    call: StepCall,
    *,
    lasting: Collection[Node] = (),
    pending: Collection[Node] | None = None,
) -> SlottedStep:
    """Give every operation of a step a slot of a call.

    An operation runs in the slot of its task. One that an earlier slot needs runs there, if it is of the same layer,
    such as the backward of an activation before both X and W, or of the update, such as a number for all layers; so
    does one that is of no task.

    Args:
        graph: Of the whole step.
        places: The tasks of operations.
        call: What a call runs.
        lasting: Inputs of the graph that are the same memory in every call: weights, buffers and the optimizer's state.
        pending: Those of them that are hidden between calls; None for all. Carried slots change no others.

    Raises:
        UnsupportedError: If the step has a dependency that the order breaks.
    """
    pending = lasting if pending is None else pending
    slots = _Slots(graph, places, call, pending)
    count = len(call.slots)
    operations: list[list[Node]] = [[] for _ in range(count)]
    for node in slots.nodes:
        operations[slots.turn[node] % count].append(node)
    after = [set[int]() for _ in range(count)]
    for slot, earlier in call.waits:
        after[slot].add(earlier)
    for node in slots.nodes:
        turn = slots.turn[node]
        for used in node.all_input_nodes:
            if used in slots.turn and slots.turn[used] // count == turn // count:
                after[turn % count].add(slots.turn[used] % count)
        if turn >= count and _is_random(node):
            raise unsupported(call, f"in this step {slots.name(turn)} draws random numbers, and runs in the next call")
    _check_memory(slots, lasting, after)
    carried = {node for slot, nodes in zip(call.slots, operations, strict=True) if slot.carried for node in nodes}
    read = {used for node in carried for used in node.all_input_nodes} - carried
    returned = memories_of(graph.output_node().all_input_nodes)
    kept = frozenset(
        node
        for node in read
        if isinstance(node.meta.get("val"), torch.Tensor)
        and (node not in pending if node.op == "placeholder" else memories_of([node]) & returned)
    )
    return SlottedStep(
        call,
        tuple(map(tuple, operations)),
        tuple(frozenset(others - {slot}) for slot, others in enumerate(after)),
        kept,
    )


def _received(nodes: Sequence[Node], places: Mapping[Node, Place]) -> set[Node]:
    """Return the operations that wait for messages or take them apart: they run where they are needed first."""
    received: set[Node] = set()
    for node in nodes:
        is_message = node in places and places[node].kind is Kind.C
        if is_message and (finishes_sum(node) or any(used in received for used in node.all_input_nodes)):
            received.add(node)
    return received


def note_places(places: Mapping[Node, Place]) -> None:
    """Note the task of each operation in its metadata, which copies of the graph keep."""
    for node, place in places.items():
        node.meta[_PLACE] = place


def noted_places(graph: Graph) -> dict[Node, Place]:
    """Return the noted tasks of a graph's operations; those that passes have added inherit the task of a user."""
    places: dict[Node, Place] = {}
    for node in reversed(graph.nodes):
        place = node.meta.get(_PLACE) or next((places[user] for user in node.users if user in places), None)
        if place is not None and node.op == "call_function":
            places[node] = place
    return places


def _is_random(node: Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


class _Slots:
    """The turn of every operation: its slot, plus the number of slots if it is carried to the next call.

    Attributes:
        call: What a call runs.
        nodes: The operations, in the order in which they were traced.
        turn: Of each operation.
    """

    def __init__(self, graph: Graph, places: Mapping[Node, Place], call: StepCall, pending: Collection[Node]) -> None:
        self.call = call
        self.nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
        count = len(call.slots)
        own = {
            (slot.task.kind, layer): position + count * slot.carried
            for position, slot in enumerate(call.slots)
            for layer in range(slot.task.layer, slot.task.layer + slot.task.layers)
        }
        last = max((turn for turn in own.values() if turn < count), default=0)
        self._places = places
        received = _received(self.nodes, places)
        self._own = {node: own[places[node]] for node in self.nodes if node in places and node not in received}
        at_once = self._seen_between_calls(graph, pending, count)
        self.turn: dict[Node, int] = {}
        returned = set(graph.output_node().all_input_nodes)
        # A result without a user, such as a number read in vain, may not draw what it is made of to its place.
        idle = {node: None for node in self.nodes if not (node.users or changed_by(node))}
        for node in reversed(self.nodes):
            if node in idle:
                continue
            turns = [self.turn[user] for user in node.users if user in self.turn]  # not the output, nor what is idle
            turns += [self._own[node]] if node in self._own else []
            turns += [last] if node in returned or node in at_once or not turns else []
            self.turn[node] = min(turns)
        for node in idle:
            self.turn[node] = max((self.turn[used] for used in node.all_input_nodes if used in self.turn), default=last)
        self._items_with_their_tuple()
        for node in self.nodes:
            if node not in idle and node not in at_once:
                self._check_pulled(node)

    def _seen_between_calls(self, graph: Graph, pending: Collection[Node], count: int) -> set[Node]:
        """Return operations that may not be carried: they touch what others do that change what is seen between calls.

        An example is a loss scale, or the sums of micro-batches.
        """
        late = [node for node, turn in self._own.items() if turn >= count]
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        open_to_all = memories_of(node for node in inputs if node not in pending) - memories_of(pending)
        needed = memories_of(one for node in late for one in changed_by(node)) & open_to_all
        found: set[Node] = set()
        for node in reversed(self.nodes):  # with what writes, before them, what they read
            touched = memories_of((node, *node.all_input_nodes))
            is_needed = bool(touched & needed & open_to_all) or bool(memories_of(changed_by(node)) & needed)
            if node in self._own and self._own[node] >= count and is_needed:
                found.add(node)
                needed |= touched
        return found

    def _items_with_their_tuple(self) -> None:
        for node in self.nodes:
            if node.target is getitem and node.args[0] in self.turn:
                self.turn[node] = self.turn[node.args[0]]

    def _check_pulled(self, node: Node) -> None:
        """Refuse to run an operation before the slot of its task, unless it belongs where it is needed."""
        turn, own = self.turn[node], self._own.get(node)
        if own is None or turn >= own or node.target is getitem:
            return
        slot = self.call.slots[turn % len(self.call.slots)]
        kind, layer = self._places[node]
        # Numbers for all layers, such as a bias correction, are of U; what they are computed from is checked by itself.
        is_number = kind is Kind.U and not changed_by(node)
        if is_number or (layer == slot.task.layer and slot.task.kind is not Kind.F):
            return
        raise unsupported(
            self.call,
            f"in this step {slot.task.kind}{slot.task.layer} needs a part of {kind}{layer}, which comes later",
        )

    def name(self, turn: int) -> str:
        task = self.call.slots[turn % len(self.call.slots)].task
        return f"{task.kind}{task.layer}"


def unsupported(call: StepCall, reason: str) -> UnsupportedError:
    """Return the error of a schedule that a step cannot be run by."""
    plain = 'use policy="auto"' if call.schedule.policy in ("in_order", "ddp") else 'use policy="in_order", or "auto"'
    return UnsupportedError(
        f"policy={call.schedule.policy!r}",
        reason,
        f"{plain}; clipping by a norm and scaled losses need all gradients before any update",
    )


class _Use(NamedTuple):
    """A use of memory: in which turn, of which bytes, and whether it writes them."""

    turn: int
    first: int
    end: int
    writes: bool

    def conflicts_with(self, other: _Use) -> bool:
        """Return whether the order of the two can be seen."""
        return (self.writes or other.writes) and self.first < other.end and other.first < self.end


def _check_memory(slots: _Slots, lasting: Collection[Node], after: Sequence[set[int]]) -> None:
    """Check that memory is read and written in the traced order, within a step and from one to the next.

    What must follow what is added to ``after``.
    """
    uses: dict[int, list[_Use]] = defaultdict(list)
    for node in slots.nodes:
        turn, changed = slots.turn[node], set(changed_by(node))
        if not changed and memories_of([node]) & memories_of(node.all_input_nodes):
            continue  # a view reads nothing
        for used in (node, *node.all_input_nodes):
            extent = extent_of(used)
            # An operation that changes a tensor returns it.
            if extent is not None:
                writes = used in changed or (used is node and any(extent_of(one) == extent for one in changed))
                use = _Use(turn, *extent[1:], writes)
                if not uses[extent[0]] or uses[extent[0]][-1] != use:
                    uses[extent[0]].append(use)
        if _is_random(node):
            uses[_RANDOM].append(_Use(turn, 0, 1, True))
        if starts_sum(node):
            uses[_LINK].append(_Use(turn, 0, 1, True))
    in_every_call = {*memories_of(lasting), _LINK, _RANDOM}
    for memory, of_memory in uses.items():
        if any(use.writes for use in of_memory):
            # The next step uses what lasts in the same turns, one call later.
            count = len(slots.call.slots) if memory in in_every_call else 0
            again = [use._replace(turn=use.turn + count) for use in of_memory] if count else []
            _check_uses(slots, [*of_memory, *again], after)


def _check_uses(slots: _Slots, uses: Sequence[_Use], after: Sequence[set[int]]) -> None:
    """Check the uses of one memory, in the traced order."""
    count = len(slots.call.slots)
    for number, use in enumerate(uses):
        for earlier in uses[:number]:
            if not use.conflicts_with(earlier):
                continue
            if use.turn < earlier.turn:
                raise unsupported(
                    slots.call,
                    f"in this step {slots.name(use.turn)} uses memory before {slots.name(earlier.turn)} does, which "
                    "comes first",
                )
            if earlier.turn // count == use.turn // count:
                after[use.turn % count].add(earlier.turn % count)
