from hypothesis import given

from gradweave.schedule import Costs, Discipline, Family, Lane, Schedule, pipeline
from gradweave.schedule.list_scheduling import greedy, link_lanes
from gradweave.schedule.transforms import contiguous, place
from schedule.strategies import graphs


@given(graphs(Family.PIPELINE))
def test_the_fixed_order_is_no_slower_than_picking_at_run_time(graph):
    graph = place(graph, contiguous(graph.layers, graph.cluster.devices))
    urgency = [(task.microbatch, task.layer) for task in graph.tasks]
    fixed = greedy(graph, urgency, policy="test")
    assert all(lane.discipline is Discipline.IN_ORDER for lane in fixed.lanes if lane.resource in graph.devices)
    picking = tuple(
        Lane(lane.name, lane.resource, tuple(sorted(lane.tasks, key=urgency.__getitem__)), Discipline.PRIORITY)
        for lane in fixed.lanes
        if lane.resource in graph.devices
    )
    at_run_time = Schedule(graph, (*picking, *link_lanes(graph))).simulate()
    assert fixed.simulate().makespan <= at_run_time.makespan * (1 + 1e-9)


def test_the_most_urgent_ready_task_goes_first():
    graph = place(pipeline(Costs.uniform(1), stages=1, microbatches=3), contiguous(1, 1))
    backwards = [-task.microbatch for task in graph.tasks]
    order = greedy(graph, backwards, policy="test").lanes[0].tasks
    assert [graph.tasks[i].microbatch for i in order[:3]] == [2, 2, 2]
