"""The pass that sends gradients while backward goes on."""

from __future__ import annotations

from torch.fx import Graph, Node

from gradweave._compat.distributed import finishes_sum, starts_sum
from gradweave.step_graph.nodes import changed_by, is_mutable, memories_of, phase_of


def send_behind_gradients(graph: Graph) -> None:
    """Move each message to where the last of its gradients is computed; what waits for messages stays where it is.

    A step is traced with all messages behind backward. None is moved to before a write of what it carries. Their order
    stays as it was traced: by the order ranks match them. Sums with the gradients of earlier micro-batches, which a
    message is made of, move with it.

    Args:
        graph: Of the whole step; changed.
    """
    nodes = list(graph.nodes)
    movable = _behind_no_message(nodes)
    place = {node: number for number, node in enumerate(nodes)}
    earliest: dict[Node, int] = {}
    written: dict[int, int] = {}
    first = max((place[node] for node in nodes if node.op == "placeholder"), default=0)
    last_sent = 0
    for node in nodes:
        if node not in movable:
            written.update(dict.fromkeys(memories_of(changed_by(node)), place[node]))
            continue
        used = node.all_input_nodes
        after = [earliest.get(n, place[n]) for n in used] + [written.get(memory, 0) for memory in memories_of(used)]
        when = max(after, default=first)  # what needs nothing, such as the flags of a message
        if starts_sum(node):  # in the order of all messages of the group
            when = last_sent = max(when, last_sent)
        earliest[node] = when
    for node in reversed(nodes):  # so that those that are moved to one place stay in their order
        if node in earliest and earliest[node] < place[node]:
            nodes[earliest[node]].append(node)
    graph.lint()


def _behind_no_message(nodes: list[Node]) -> set[Node]:
    """Return the operations that messages are made of: they write nothing, and wait for no other rank."""
    waiting: set[Node] = set()
    sending: set[Node] = set()
    for node in nodes:
        is_ours = finishes_sum(node) and phase_of(node) == "communication"  # and no message of the user's own
        if is_ours or any(used in waiting for used in node.all_input_nodes):
            waiting.add(node)
    for node in reversed(nodes):
        if node.op != "call_function" or node in waiting or is_mutable(node):
            continue
        phase = phase_of(node)
        makes_messages = phase == "gradients" and bool(node.users) and all(user in sending for user in node.users)
        if phase == "communication" or makes_messages:
            sending.add(node)
    return sending
