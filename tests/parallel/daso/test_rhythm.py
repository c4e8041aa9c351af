import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradweave.parallel.daso.rhythm import Figures, PaperRhythm, Phase, Plateau, Rhythm
from parallel.daso.training import options


def feed(rhythm, *figures):
    for number, figure in enumerate(figures):
        rhythm.merged(number, figure)
    return rhythm.every, rhythm.wait


def test_as_many_steps_of_waiting_as_a_transfer_takes():
    assert feed(Rhythm(options()), *[Figures(seconds=2.5, compute=1.0)] * 3) == (3, 3)
    assert feed(Rhythm(options()), *[Figures(seconds=0.7, compute=1.0)] * 3) == (1, 1)
    assert feed(Rhythm(options(every=8)), *[Figures(seconds=2.5, compute=1.0)] * 3) == (8, 3)
    assert feed(Rhythm(options(wait=2)), *[Figures(seconds=9.0, compute=1.0)] * 3) == (2, 2)
    assert feed(Rhythm(options(every=2)), *[Figures(seconds=9.0, compute=1.0)] * 3) == (2, 2)


def test_nodes_do_not_stay_apart_for_long_unless_asked_to():
    rhythm = Rhythm(options())
    assert feed(rhythm, *[Figures(seconds=90.0, compute=1.0, work=9.0)] * 9) == (16, 16)
    assert rhythm.waits > 16, "and say that training waits"
    asked = Rhythm(options(every=60))
    assert feed(asked, *[Figures(seconds=40.0, compute=1.0, work=9.0)] * 12) == (60, 41)
    assert asked.waits == 0
    assert feed(rhythm, *[Figures(seconds=0.5, compute=1.0, work=0.0)] * 12) == (1, 1)
    assert rhythm.waits == 0


def test_work_is_spread_over_enough_steps():
    every, wait = feed(Rhythm(options()), *[Figures(seconds=0.5, compute=1.0, work=0.2)] * 9)
    assert (every, wait) == (4, 1)


def test_a_small_drift_changes_nothing_and_a_large_one_does():
    rhythm = Rhythm(options())
    feed(rhythm, *[Figures(seconds=1.75, compute=1.0)] * 2)
    changes = len(rhythm.changes)
    feed(rhythm, *[Figures(seconds=seconds, compute=1.0) for seconds in (1.6, 1.79, 1.5, 1.7)])
    assert len(rhythm.changes) == changes
    assert feed(rhythm, *[Figures(seconds=6.5, compute=1.0)] * 9) == (7, 7)
    assert feed(rhythm, *[Figures(seconds=0.5, compute=1.0)] * 9) == (1, 1)


def test_rarer_as_the_learning_rate_falls():
    rhythm = Rhythm(options(pace="lr"))
    assert feed(rhythm, Figures(seconds=1.5, compute=1.0, lr=0.1)) == (2, 2)
    assert feed(rhythm, Figures(seconds=1.5, compute=1.0, lr=0.05)) == (8, 2)
    assert feed(rhythm, Figures(seconds=1.5, compute=1.0, lr=1e-6)) == (256, 2)


def test_nodes_wait_no_longer_than_until_the_next_exchange():
    rhythm = Rhythm(options(pace="lr"))
    for _ in range(12):
        every, wait = feed(rhythm, Figures(seconds=1e4, compute=1.0, lr=1e-6))
        assert wait <= every


def test_one_stall_is_not_the_network():
    rhythm = Rhythm(options())
    feed(rhythm, *[Figures(seconds=0.5, compute=1.0)] * 3)
    assert feed(rhythm, Figures(seconds=3000.0, compute=1.0))[1] <= 3


def test_rarer_until_a_plateau():
    rhythm = Rhythm(options(pace="plateau"))
    figures = [Figures(seconds=0.5, compute=1.0, loss=loss) for loss in (1.0, 0.5, 0.5, 0.5, 0.5)]
    seen = [feed(rhythm, figure)[0] for figure in figures]
    assert seen == [4, 4, 4, 4, 2]


@given(st.lists(st.floats(0, 10), max_size=40))
def test_a_plateau_is_the_third_bad_loss_since_the_best(losses):
    plateau, best, bad = Plateau(), math.inf, 0
    for loss in losses:
        improved = loss < 0.95 * best
        best, bad = (loss, 0) if improved else (best, bad + 1)
        assert plateau.see(loss) == (bad == 3)
        bad %= 3
    assert not plateau.see(math.nan)


def test_phases():
    rhythm = Rhythm(options(warm_up=2, total=10, cool_down=3))
    assert [rhythm.phase(step) for step in (0, 1, 2, 6, 7, 20)] == [
        Phase.TOGETHER, Phase.TOGETHER, Phase.APART, Phase.APART, Phase.TOGETHER, Phase.TOGETHER
    ]  # fmt: skip
    assert (rhythm.last_step_apart(3), rhythm.last_step_apart(8), Rhythm(options()).last_step_apart(3)) == (6, 8, None)


def test_published_phases_are_four_epochs():
    rhythm = PaperRhythm(options(mode="paper", total=10))
    seen = []
    for _ in range(10):
        seen.append(rhythm.phase(0) is Phase.TOGETHER)
        rhythm.epoch_ended(0, Figures(loss=1.0))
    assert seen == [True] * 4 + [False] * 2 + [True] * 4


@pytest.mark.parametrize("kind", [Rhythm, PaperRhythm])
def test_state_comes_back(kind):
    given = options(mode="paper" if kind is PaperRhythm else "delta")
    rhythm = kind(given)
    feed(rhythm, *[Figures(seconds=2.5, compute=1.0, work=0.3, loss=1.0)] * 3)
    rhythm.epoch_ended(3, Figures(loss=1.0))
    other = kind(given)
    other.restore(rhythm.state())
    assert other == rhythm
