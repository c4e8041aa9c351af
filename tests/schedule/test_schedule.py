from gradweave.schedule import Costs, Schedule, plan, single


def test_a_schedule_is_data_that_can_be_made_by_hand():
    graph = single(Costs.uniform(2))
    made = plan(graph, policy="in_order")
    by_hand = Schedule(graph, made.lanes)
    assert by_hand.policy == "custom"
    assert by_hand.simulate().makespan == made.simulate().makespan
