"""Messages are sent as soon as their gradients are there, in the order in which they were traced."""

import random

import pytest
import torch
from torch.fx import Graph

from gradweave._compat.distributed import finishes_sum, starts_sum
from gradweave.compiler.passes.communication import send_behind_gradients
from gradweave.step_graph.nodes import set_phase

ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default
WAIT = torch.ops._c10d_functional.wait_tensor.default
MUL, RELU, ADD, CAT = (
    torch.ops.aten.mul.Tensor, torch.ops.aten.relu.default, torch.ops.aten.add.Tensor, torch.ops.aten.cat.default,
)  # fmt: skip


def step_graph(layers, messages, *, summed=False):
    """Return the graph of a backward of some layers, the messages of whose gradients are all behind it."""
    graph = Graph()

    def call(phase, name, target, *arguments):
        node = graph.create_node("call_function", target, arguments, name=name)
        set_phase(node, phase)
        return node

    x = graph.placeholder("x")
    sums = [graph.placeholder(f"sum_{layer}") for layer in range(layers)]
    gradients, above = {}, x
    for layer in reversed(range(layers)):
        gradients[layer] = call("backward", f"w{layer}", RELU, above)
        above = call("backward", f"x{layer}", RELU, above)
    if summed:
        gradients = {n: call("gradients", f"total{n}", ADD, sums[n], grad) for n, grad in gradients.items()}
    sent = []
    for number, message in enumerate(messages):
        parts = [call("communication", f"part{layer}", MUL, gradients[layer], 0.5) for layer in message]
        flags = call("communication", f"flags{number}", torch.ops.aten.ones.default, [len(message)])
        wire = call("communication", f"wire{number}", CAT, [*parts, flags])
        sent.append(call("communication", f"send{number}", ALL_REDUCE, wire, "sum", "0"))
    averages = [call("communication", f"wait{number}", WAIT, start) for number, start in enumerate(sent)]
    for number, average in enumerate(averages):
        call("update", f"u{number}", torch.ops.aten.add_.Tensor, sums[number], average)
    graph.output(above)
    return graph


def names(graph):
    return [node.name for node in graph.nodes if node.op == "call_function"]


def test_a_message_is_sent_behind_its_last_gradient():
    graph = step_graph(3, [[2], [1, 0]])
    send_behind_gradients(graph)
    assert [name for name in names(graph) if "flags" not in name] == [
        "w2", "part2", "wire0", "send0", "x2", "w1", "part1", "x1", "w0", "part0", "wire1", "send1", "x0",
        "wait0", "wait1", "u0", "u1",
    ]  # fmt: skip


def test_sums_of_micro_batches_are_sent_as_early():
    graph = step_graph(2, [[1], [0]], summed=True)
    send_behind_gradients(graph)
    order = [name for name in names(graph) if "flags" not in name]
    assert order[:6] == ["w1", "total1", "part1", "wire0", "send0", "x1"]


@pytest.mark.parametrize("seed", range(20))
def test_messages_keep_their_order_and_waits_stay_behind_backward(seed):
    generator = random.Random(seed)
    layers = generator.randint(1, 8)
    order = generator.sample(range(layers), layers)
    cuts = sorted(generator.sample(range(1, layers), generator.randint(0, layers - 1)))
    messages = [order[a:b] for a, b in zip([0, *cuts], [*cuts, layers], strict=True)]
    graph = step_graph(layers, messages, summed=generator.random() < 0.5)
    before = set(names(graph))
    send_behind_gradients(graph)
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    assert {node.name for node in nodes} == before
    place = {node.name: number for number, node in enumerate(nodes)}
    sends = [place[node.name] for node in nodes if starts_sum(node)]
    assert [place[f"send{n}"] for n in range(len(messages))] == sorted(sends)
    assert min(place[node.name] for node in nodes if finishes_sum(node)) > place["x0"]
