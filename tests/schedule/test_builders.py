import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradweave.errors import ArgumentError
from gradweave.schedule import Costs, Family, Kind, LayerCost, Link, data_parallel, hierarchical, pipeline, single
from schedule.strategies import graphs


def needs_of(graph, kind, layer, microbatch=0, step=0):
    (i,) = graph.find(kind, [layer], step, microbatch)
    return {
        (graph.tasks[n].kind, graph.tasks[n].layer, graph.tasks[n].microbatch, graph.tasks[n].step)
        for n in graph.needs[i]
    }


def test_dependencies_of_a_step():
    graph = pipeline(Costs.uniform(3), stages=1, microbatches=2, next_forward=True)
    assert needs_of(graph, Kind.F, 1, 1) == {(Kind.F, 0, 1, 0)}
    assert needs_of(graph, Kind.X, 1, 1) == {(Kind.F, 1, 1, 0), (Kind.X, 2, 1, 0)}
    assert needs_of(graph, Kind.W, 1, 1) == {(Kind.F, 1, 1, 0), (Kind.X, 2, 1, 0)}
    assert needs_of(graph, Kind.X, 2) == {(Kind.F, 2, 0, 0)}
    # An update waits for the input gradients too: they are computed with the old weights.
    assert needs_of(graph, Kind.U, 1) == {(kind, 1, m, 0) for kind in (Kind.X, Kind.W) for m in (0, 1)}
    assert needs_of(graph, Kind.F, 1, 1, step=1) == {(Kind.F, 0, 1, 1), (Kind.U, 1, 0, 0)}


def test_replicas_update_after_their_message():
    graph = data_parallel(Costs.uniform(3), replicas=4, link=Link(1.0))
    assert needs_of(graph, Kind.U, 1) == {(Kind.C, 1, 0, 0), (Kind.X, 1, 0, 0)}
    (messages,) = graph.communication.values()
    assert [graph.tasks[i].layer for i in messages] == [2, 1, 0]
    assert {graph.tasks[i].seconds for i in messages} == {1.5}


def test_a_hierarchy_starts_out_flat():
    graph = hierarchical(Costs.uniform(2), nodes=2, local_ranks=2, link=Link(1.0))
    (messages,) = graph.communication.values()
    assert {graph.tasks[i].seconds for i in messages} == {1.5}
    with pytest.raises(ArgumentError, match="local_ranks=0"):
        hierarchical(Costs.uniform(2), nodes=2, local_ranks=0, link=Link())
    with pytest.raises(ArgumentError, match="nodes=0"):
        hierarchical(Costs.uniform(2), nodes=0, local_ranks=2, link=Link())
    with pytest.raises(ArgumentError, match="replicas=0"):
        data_parallel(Costs.uniform(2), replicas=0, link=Link())


def test_the_last_forward_holds_its_inputs():
    without, with_forward = (single(Costs.uniform(4), next_forward=more) for more in (False, True))
    assert len(with_forward.buffers) == len(without.buffers) + 4
    assert all(len(buffer.users) == 2 for buffer in with_forward.buffers[-4:])


def test_lifetimes_of_bytes():
    layers = tuple(
        LayerCost(f"l{i}", 1, 1, 1, input_bytes=10 * i + 1, output_bytes=10 * i + 2, parameter_bytes=10 * i + 3)
        for i in range(2)
    )
    graph = single(Costs(layers), next_forward=False)
    users = {b.size: {(graph.tasks[i].kind, graph.tasks[i].layer) for i in b.users} for b in graph.buffers}
    assert users == {
        1: {(Kind.F, 0), (Kind.W, 0)},
        2: {(Kind.X, 1), (Kind.X, 0), (Kind.W, 0)},
        3: {(Kind.W, 0), (Kind.U, 0)},
        11: {(Kind.F, 1), (Kind.W, 1)},
        12: {(Kind.X, 1), (Kind.W, 1)},
        13: {(Kind.W, 1), (Kind.U, 1)},
    }


@given(st.data(), st.sampled_from(Family))
def test_task_counts(data, family):
    graph = data.draw(graphs(family))
    count = {kind: sum(task.kind is kind for task in graph.tasks) for kind in Kind}
    per_step = graph.layers * graph.microbatches
    replicas = family in (Family.DATA_PARALLEL, Family.HIERARCHICAL)
    assert count == {
        Kind.F: per_step * graph.forwards,
        Kind.X: per_step * graph.steps,
        Kind.W: per_step * graph.steps,
        Kind.U: graph.layers * graph.steps,
        Kind.C: graph.layers * graph.steps if replicas else 0,
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stages": 4, "microbatches": 1}, "stages=4: give 1 to 3"),
        ({"stages": 0, "microbatches": 1}, "stages=0: give 1 to 3"),
        ({"stages": 1, "microbatches": 0}, "microbatches=0"),
        ({"stages": 1, "microbatches": 1, "steps": 0}, "steps=0"),
    ],
)
def test_senseless_sizes_are_rejected(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        pipeline(Costs.uniform(3), **arguments)
