import pytest
import torch

from gradweave._compat.tracing import fake_mode, fake_of, trace_to_graph
from gradweave.step_graph.nodes import (
    changed_by,
    has_data_dependent_size,
    is_mutable,
    memories_of,
    memory_of_node,
    phase,
    phase_of,
    root,
    set_phase,
)

aten = torch.ops.aten


def traced(function, *inputs):
    mode = fake_mode()
    with mode:
        graph = trace_to_graph(function)(*(fake_of(mode, x) for x in inputs)).graph
    return graph, [node for node in graph.nodes if node.op == "placeholder"]


def test_arguments_that_are_written_are_changed():
    def function(x, y):
        x.add_(y)
        aten._foreach_add_([x, y], 1.0)
        aten.sub.out(x, y, out=y)
        return x * y

    graph, (x, y) = traced(function, torch.ones(2), torch.ones(2))
    calls = [node for node in graph.nodes if node.op == "call_function"]
    changes = [{root(argument) for argument in changed_by(node)} for node in calls if is_mutable(node)]
    assert changes == [{x}, {x, y}, {y}]
    assert not changed_by(calls[-1])


def test_results_of_in_place_operations_are_their_argument():
    graph, (x,) = traced(lambda x: x.add_(1).mul_(2) + 0, torch.ones(2))
    result = graph.output_node().args[0]
    assert root(result) is result
    assert root(result.args[0]) is x


def test_views_have_the_memory_of_their_base():
    graph, (x, y) = traced(lambda x, y: (x.view(2, 2).t(), y * 2), torch.ones(4), torch.ones(4))
    view, product = graph.output_node().args[0]
    assert memory_of_node(view) == memory_of_node(x)
    assert memories_of([view, x, y]) == {memory_of_node(x), memory_of_node(y)}
    assert memory_of_node(product) not in memories_of([x, y])


def test_phases():
    def function(x):
        with phase("forward"):
            y = x * 2
        with phase("update"):
            return y + 1

    graph = trace_to_graph(function)(torch.ones(2)).graph
    multiplied, added = (node for node in graph.nodes if node.op == "call_function")
    assert (phase_of(multiplied), phase_of(added)) == ("forward", "update")
    assert phase_of(next(iter(graph.nodes))) == ""
    set_phase(added, "backward")
    assert phase_of(added) == "backward"


@pytest.mark.parametrize(
    ("target", "indices", "expected"),
    [
        (aten.mul.Tensor, [], False),
        (aten.nonzero.default, [], True),
        (aten.index.Tensor, [torch.tensor([0])], False),
        (aten.index.Tensor, [torch.tensor([True])], True),
        (aten.index.Tensor, [None], True),
    ],
)
def test_sizes_that_depend_on_data(target, indices, expected):
    assert has_data_dependent_size(target, indices) is expected
