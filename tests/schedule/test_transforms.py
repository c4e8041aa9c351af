import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradweave.errors import ArgumentError
from gradweave.schedule import Costs, Family, Kind, Link, data_parallel, pipeline
from gradweave.schedule.transforms import bucket, contiguous, place
from schedule.strategies import graphs


@given(st.integers(1, 40), st.data())
def test_contiguous_runs_are_even(layers, data):
    devices = data.draw(st.integers(1, layers))
    placement = [contiguous(layers, devices)(layer) for layer in range(layers)]
    assert placement == sorted(placement)
    sizes = [placement.count(device) for device in range(devices)]
    assert max(sizes) - min(sizes) <= 1
    assert sorted(sizes, reverse=True) == sizes


def test_results_that_cross_devices_are_sent_once():
    graph = place(pipeline(Costs.uniform(4), stages=2, microbatches=1, link=Link(2.0, 0.25)), contiguous(4, 2))
    sent = {link: [graph.tasks[i] for i in tasks] for link, tasks in graph.communication.items()}
    assert {link: [(t.layer, t.note) for t in tasks] for link, tasks in sent.items()} == {
        "link 0>1": [(1, "after F")],
        "link 1>0": [(2, "after X")],
    }
    assert {task.seconds for tasks in sent.values() for task in tasks} == {0.75}
    # Both X and W of layer 1 wait for the gradient's arrival, not for its making.
    for kind in (Kind.X, Kind.W):
        (i,) = graph.find(kind, [1], 0)
        assert {graph.tasks[n].kind for n in graph.needs[i]} == {Kind.C, Kind.F}


def test_a_gradient_occupies_its_receiver_from_the_start_of_the_transfer():
    link = Link(0.1)
    graph = place(pipeline(Costs.uniform(2), stages=2, microbatches=1, link=link), contiguous(2, 2))
    (sent_up,), (sent_down,) = (graph.communication[name] for name in ("link 0>1", "link 1>0"))
    assert graph.tasks[sent_up].seconds == 10
    gradient = [b for b in graph.buffers if b.device == "gpu0" and sent_down in b.users]
    assert len(gradient) == 1
    made = graph.find(Kind.X, [1], 0)[0]
    assert all(made not in b.users for b in graph.buffers if b.device == "gpu0")


def test_a_free_link_needs_no_transfers():
    graph = place(pipeline(Costs.uniform(4), stages=2, microbatches=1), contiguous(4, 2))
    assert graph.communication == {}


@given(graphs(Family.PIPELINE), st.integers(1, 3))
def test_placing_keeps_every_task_and_puts_layers_together(graph, group):
    placed = place(graph, lambda layer: layer // group % graph.cluster.devices)
    kept = [task for task in placed.tasks if task.kind is not Kind.C]
    assert [(t.kind, t.layer, t.microbatch, t.step, t.seconds) for t in kept] == [
        (t.kind, t.layer, t.microbatch, t.step, t.seconds) for t in graph.tasks
    ]
    assert all(task.resource == f"gpu{task.layer // group % graph.cluster.devices}" for task in kept)
    assert sum(b.size for b in placed.buffers) == sum(b.size for b in graph.buffers)


def messages(graph):
    return [(t.layer, t.layers, t.payload) for t in graph.tasks if t.kind is Kind.C]


def test_buckets_close_at_their_size_and_follow_the_order():
    graph = data_parallel(Costs.uniform(5), replicas=2, link=Link(1.0))
    assert messages(bucket(graph, 0)) == [(4, 1, 1), (3, 1, 1), (2, 1, 1), (1, 1, 1), (0, 1, 1)]
    assert messages(bucket(graph, 2)) == [(3, 2, 2), (1, 2, 2), (0, 1, 1)]
    # What is held back shares no message with what is not, also where the layers border on each other.
    assert sorted(messages(bucket(graph, 99, k=2))) == [(0, 2, 2), (2, 3, 3)]
    assert sorted(messages(bucket(graph, 99, k=1))) == [(0, 1, 1), (1, 4, 4)]
    with pytest.raises(ArgumentError, match="bucket_bytes=-1"):
        bucket(graph, -1)


@given(graphs(Family.DATA_PARALLEL), st.integers(0, 300))
def test_bucketing_keeps_bytes_and_dependencies(graph, bucket_bytes):
    together = bucket(graph, bucket_bytes)
    assert sum(t.payload for t in together.tasks if t.kind is Kind.C) == sum(
        t.payload for t in graph.tasks if t.kind is Kind.C
    )
    for layer in range(graph.layers):
        (u,) = together.find(Kind.U, [layer], 0)
        (message,) = [n for n in together.needs[u] if together.tasks[n].kind is Kind.C]
        task = together.tasks[message]
        assert task.layer <= layer < task.layer + task.layers
        members = range(task.layer, task.layer + task.layers)
        assert set(together.needs[message]) == set(together.find(Kind.W, members, 0))


def test_messages_burden_who_makes_them_and_who_first_needs_them():
    link = Link(2.0, device_seconds=0.5)
    graph = place(pipeline(Costs.uniform(2), stages=2, microbatches=1, link=link), contiguous(2, 2))
    seconds = {(task.kind, task.layer): task.seconds for task in graph.tasks if task.kind is not Kind.C}
    assert seconds[Kind.F, 0] == seconds[Kind.F, 1] == 1.5
    assert seconds[Kind.X, 1] == 1.5
    assert sorted((seconds[Kind.X, 0], seconds[Kind.W, 0])) == [1.0, 1.5]
    assert seconds[Kind.W, 1] == 1.0
