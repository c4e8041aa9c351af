"""Statistics and timelines of a run."""

from pathlib import Path

import pytest
import torch.distributed as dist

from gradweave.parallel.daso import DASO
from gradweave.parallel.daso.stats import Stats, predict
from parallel.daso.training import TIMEOUT, one_step, setting, train


def timeline(*, folder):
    model, opt = setting()
    daso = DASO(model, opt, timeout=TIMEOUT, every=3, wait=1)
    for step in range(20):
        one_step(model, opt, step)
    planned, measured = daso.timelines()
    path = Path(folder) / f"{dist.get_rank()}.png"
    daso.save_timeline(path)
    daso.finish()
    return [sorted({span.lane for span in t.spans}) for t in (planned, measured)], path.stat().st_size


def test_a_picture_of_what_was_planned_and_measured(two_by_two, tmp_path):
    for lanes, size in two_by_two.run(timeline, folder=str(tmp_path)).values():
        assert lanes == [["global link", "gpu0 main", "local link"], ["global link", "gpu0 main"]]
        assert size > 10_000


@pytest.mark.parametrize(
    ("transfer", "every", "wait", "expected"),
    [(1.0, 2, 2, 1.0), (2.5, 4, 1, 1.0 + 1.5 / 4), (3.0, 1, 1, 3.0), (0.5, 1, 0, 1.5)],
)
def test_the_simulator_knows_what_is_exposed(transfer, every, wait, expected):
    timeline = predict(1.0, transfer, nodes=2, local_ranks=2, every=every, wait=wait, steps=60)
    assert timeline.step_time == pytest.approx(expected, rel=0.02)


def test_figures(two_by_two):
    for rank, result in two_by_two.run(train, steps=9, every=3, wait=1, payload="float32").items():
        stats = result["stats"]
        exchanges = [2, 1][rank % 2]
        weights = 6 * 8 + 8 + 8 * 3 + 3
        assert stats["exchanges"] == exchanges
        assert stats["bytes_sent"] == exchanges * 4 * weights
        assert (stats["every"], stats["wait"], stats["staleness"], stats["steps"]) == (3, 1, 1, 9)
        assert all(isinstance(value, (int, float)) for value in stats.values())
        assert 0 <= stats["exposed_seconds"] < 30


def test_waiting_is_not_part_of_a_step():
    stats = Stats()
    for _ in range(4):
        stats.stepped()
        stats.waited(1000.0)
    assert stats.step_seconds < 0
    stats.paused()
    stats.stepped()
    assert stats.exposed == 4000.0
