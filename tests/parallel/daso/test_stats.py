import pytest

from gradweave.parallel.daso.stats import Record, predict


def test_a_picture_of_what_was_planned_and_measured(two_by_two, tmp_path):
    for lanes, size in two_by_two.run("timeline", folder=str(tmp_path)).values():
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
    for rank, result in two_by_two.run("train", steps=9, every=3, wait=1, payload="float32").items():
        stats = result["stats"]
        exchanges = [2, 1][rank % 2]
        weights = 6 * 8 + 8 + 8 * 3 + 3
        assert stats["exchanges"] == exchanges
        assert stats["bytes_sent"] == exchanges * 4 * weights
        assert (stats["every"], stats["wait"], stats["staleness"], stats["steps"]) == (3, 1, 1, 9)
        assert all(isinstance(value, (int, float)) for value in stats.values())
        assert 0 <= stats["exposed_seconds"] < 30


def test_waiting_is_not_part_of_a_step():
    record = Record()
    for _ in range(4):
        record.stepped()
        record.waited(1000.0)
    assert record.step_seconds < 0
    record.paused()
    record.stepped()
    assert record.exposed == 4000.0
