"""Programs: what each rank does, for every schedule, and what it holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradweave.errors import ArgumentError
from gradweave.parallel.pipeline.partition import stage_graph
from gradweave.parallel.pipeline.programs import ONE_STAGE, POLICIES, V_SHAPED, make_program
from gradweave.schedule import Costs, LayerCost, Link, pipeline, plan
from gradweave.schedule.policies.memory_bounded import Backlog


def runs_of(layers, stages):
    size = layers // stages
    return [range(i * size, (i + 1) * size) for i in range(stages)]


def made(policy, ranks, layers, microbatches, per_rank=1, costs=None, **options):
    costs = costs or Costs.uniform(layers)
    runs = runs_of(layers, int(ranks * per_rank))
    link = options.pop("link", Link())
    graph = stage_graph(costs, runs, ranks=ranks, microbatches=microbatches, link=link)
    program = make_program(policy, graph, **options)
    return program, program.predict(costs, runs, link=link)


def check(program, microbatches):
    """Everything once, F before X before W, on one rank, and micro-batches in order: sums depend on it."""
    for rank, actions in enumerate(program.ranks):
        assert {program.rank_of[stage] for _, stage, _ in actions} == {rank}
        done = set()
        for what, stage, microbatch in actions:
            if what != "F":
                assert ("F", stage, microbatch) in done
            if what == "W":
                assert ("X", stage, microbatch) in done
            assert (what, stage, microbatch) not in done
            done.add((what, stage, microbatch))
        for stage in program.stages_of(rank):
            for half in ("F", "XB", "WB"):
                order = [microbatch for what, own, microbatch in actions if own == stage and what in half]
                assert order == list(range(microbatches))
            for microbatch in range(microbatches):
                halves = ("X", stage, microbatch) in done and ("W", stage, microbatch) in done
                assert halves != (("B", stage, microbatch) in done)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 4), (4, 8)])
def test_every_schedule_does_everything_once_and_in_a_possible_order(policy, ranks, microbatches):
    per_rank = 1 if policy in ONE_STAGE else 2
    program, timeline = made(policy, ranks, 2 * ranks, microbatches, per_rank)
    check(program, microbatches)
    assert timeline.makespan >= 2 * 3 * microbatches
    wanted = [*range(ranks), *reversed(range(ranks))] if policy in V_SHAPED else [*range(ranks)] * per_rank
    assert list(program.rank_of) == wanted


@pytest.mark.parametrize(
    ("ranks", "microbatches", "gpipe", "fast_forward", "modulo"), [(4, 4, 126, 90, 75), (8, 8, 135, 93, 79)]
)
def test_known_figures_for_layers_of_one_second(ranks, microbatches, gpipe, fast_forward, modulo):
    assert made("gpipe", ranks, 24, microbatches)[1].makespan == gpipe
    assert made("fast_forward", ranks, 24, microbatches)[1].makespan == fast_forward
    assert made("modulo", ranks, 24, microbatches, 24 // ranks)[1].makespan == modulo


@pytest.mark.parametrize("policy", ["gpipe", "one_f_one_b"])
def test_gpipe_and_1f1b_are_those_of_the_scheduler(policy):
    costs = Costs(tuple(LayerCost(f"{i}", 1 + i % 3, 2, 1, 0.5, 3, 4, 5) for i in range(8)))
    link = Link(10.0, 0.1)
    known = plan(pipeline(costs, stages=4, microbatches=6, link=link), policy=policy).simulate()
    found = made(policy, 4, 8, 6, costs=costs, link=link)[1]
    assert found.makespan == pytest.approx(known.makespan)
    assert found.peak_bytes == known.peak_bytes


@pytest.mark.parametrize("cap", [1, 2, 3])
@pytest.mark.parametrize("policy", ["fast_forward", "modulo", "memory_bounded"])
def test_a_cap_holds_on_every_rank(policy, cap):
    program, _ = made(policy, 4, 8, 8, 1 if policy in ONE_STAGE else 2, max_in_flight=cap)
    assert max(program.most_in_flight) <= cap


def test_what_is_refused():
    with pytest.raises(ArgumentError, match="stages=8: gpipe has one per rank, 4"):
        made("gpipe", 4, 8, 4, 2)
    with pytest.raises(ArgumentError, match="stages=12: zbv has two per rank, 8"):
        made("zbv", 4, 12, 4, 3)
    with pytest.raises(ArgumentError, match="stages=3: give a multiple of the 2 ranks"):
        made("modulo", 2, 3, 2, 1.5)
    with pytest.raises(ArgumentError, match="torch refuses interleaved"):
        made("interleaved", 4, 8, 9, 2)
    with pytest.raises(ArgumentError, match="max_in_flight=0"):
        made("modulo", 4, 8, 4, 2, max_in_flight=0)


@given(
    ranks=st.integers(1, 4),
    per_rank=st.integers(1, 3),
    microbatches=st.integers(1, 6),
    budget=st.integers(1, 60),
    backlog=st.builds(Backlog, st.integers(0, 4), st.integers(0, 2), st.booleans()),
    seconds=st.lists(st.integers(1, 5), min_size=3, max_size=3),
)
def test_orders_within_a_bound_are_possible_and_keep_to_it(ranks, per_rank, microbatches, budget, backlog, seconds):
    stages = ranks * per_rank
    costs = Costs(tuple(LayerCost(f"{i}", *seconds, 0.0, 1, 1) for i in range(stages)))
    enough = max(budget, 2 * stages)  # for one micro-batch to pass
    program, _ = made(
        "memory_bounded", ranks, stages, microbatches, per_rank, costs, byte_budget=enough, backlog=backlog
    )
    check(program, microbatches)
    for actions in program.ranks:
        held = most = 0
        for what, _, _ in actions:
            held += {"F": 1, "X": 1, "W": -2}[what]
            most = max(most, held)
        assert most <= enough
