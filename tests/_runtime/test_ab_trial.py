"""Stock order and candidates take turns; a candidate stays only if it is clearly and always faster."""

from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradweave._runtime.ab_trial import ABTrial, TrialRules

RULES = TrialRules(warm_up=2, timed=3, rounds=3, most=0.97)


class Clock:
    """Steps take the seconds that their way takes in a round; warm-up steps ten times as long."""

    def __init__(self, seconds):
        self.spent, self.takes, self.reads = 0.0, seconds, 0

    def now(self):
        self.reads += 1
        return self.spent

    def seconds(self, begin, end):
        return end - begin


def take(trial, clock, number):
    steps = trial.rules.steps
    turn, step = divmod(number, steps)
    taken = clock.takes[trial.current][turn // len(trial.ways)]
    clock.spent += taken * (10 if step < trial.rules.warm_up else 1)


def run(seconds, *, each_step=False, rules=RULES):
    """By its ends of steps, as a loop tells of them: the first end is that of the first step of a warm-up."""
    clock = Clock({way: takes if isinstance(takes, list) else [takes] * rules.rounds for way, takes in seconds.items()})
    trial, order = ABTrial(list(seconds), clock, rules=rules, each_step=each_step), []
    while not trial.is_over:
        order.append(trial.current)
        take(trial, clock, len(order) - 1)
        trial.step_ended()
    return trial, order, clock


@pytest.mark.parametrize("each_step", [True, False])
def test_ways_take_turns_in_every_round_and_warm_up_does_not_count(each_step):
    trial, order, _ = run({"stock": 1.0, "new": 0.5}, each_step=each_step)
    assert order == (["stock"] * 5 + ["new"] * 5) * 3
    stock, new = trial.seconds()
    assert stock == pytest.approx([1.0] * 3)
    assert new == pytest.approx([0.5] * 3)


@pytest.mark.parametrize(
    ("seconds", "paying"),
    [
        ({"stock": 1.0, "a": 0.9, "b": 0.8}, ["b", "a"]),
        ({"stock": 1.0, "a": 0.98}, []),
        ({"stock": 1.0, "a": 0.97}, ["a"]),
        ({"stock": 1.0, "a": [0.5, 1.01, 0.5]}, []),
        ({"stock": [1.0, 2.0, 1.0], "a": [0.9, 1.9, 0.9]}, ["a"]),
        ({"stock": 1.0, "a": 1.5}, []),
    ],
)
def test_a_candidate_pays_if_it_is_clearly_faster_and_faster_in_every_round(seconds, paying):
    assert run(seconds)[0].paying() == paying


def test_ranks_decide_by_seconds_that_they_agree_on():
    trial, _, _ = run({"stock": 1.0, "new": 0.5})
    assert trial.paying(lambda _: [[1.0] * 3, [2.0] * 3]) == []


def test_a_clock_that_waits_is_read_twice_a_turn_only():
    _, _, clock = run({"stock": 1.0, "new": 0.5})
    assert clock.reads == 2 * 2 * RULES.rounds


def test_what_is_outside_of_steps_does_not_count():
    clock = Clock({"stock": [1.0], "new": [0.5]})
    rules = TrialRules(warm_up=1, timed=2, rounds=1)
    trial = ABTrial(["stock", "new"], clock, rules=rules, each_step=True)
    number = 0
    while not trial.is_over:
        trial.begin_step()
        clock.spent += 100  # a forward without a backward
        trial.cancel_step()
        clock.spent += 100
        trial.begin_step()
        trial.begin_step()
        take(trial, clock, number)
        trial.end_step()
        number += 1
    assert trial.seconds() == [pytest.approx([1.0]), pytest.approx([0.5])]


@given(
    st.lists(st.floats(0.1, 10), min_size=3, max_size=3),
    st.lists(st.lists(st.floats(0.1, 10), min_size=3, max_size=3), min_size=1, max_size=3),
)
def test_whatever_pays_was_faster_in_every_round(stock, candidates):
    trial, _, _ = run({"stock": stock} | dict(enumerate(candidates)))
    for way in trial.paying():
        assert all(mine < other + 1e-9 for mine, other in zip(candidates[way], stock, strict=True))
        assert median(candidates[way]) <= 0.97 * median(stock) + 1e-9
