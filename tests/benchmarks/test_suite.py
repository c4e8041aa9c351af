import math

import pytest


@pytest.fixture
def contender():
    """Makes a variant of a toy that has taken its rounds."""
    import suite
    from suite_models import TOYS

    def make(variant, milliseconds=1.0, losses=(1.0,)):
        ready = {"losses": list(losses), "seconds": 1.0, "peaks": [1, 1, 1], "reserved": 1}
        times = [milliseconds] * suite.ROUNDS
        return suite.Contender(TOYS["toy-mlp"], variant, ready=ready, status="works", times=times)

    return make


def test_all_are_measured_against_the_fastest_stock_step(contender):
    import suite
    from suite_models import TOYS

    ran = [contender("eager", 4.0), contender("whole", 2.0), contender("gradweave.compile", 1.0)]
    failed = suite.Contender(TOYS["toy-mlp"], "compile", status="failed", reason="SomeError: no")
    rows = {row["variant"]: row for row in suite.rows_of([*ran, failed, contender("whole (again)", 1.9)], {})}
    assert {row["stock_best"] for row in rows.values()} == {"whole"}
    assert [float(rows[one.variant]["ratio"]) for one in ran] == [0.5, 1.0, 2.0]
    assert (rows["compile"]["status"], rows["compile"]["ratio"], rows["compile"]["ms_50"]) == ("failed", "", "")


def test_a_step_that_was_too_slow_for_the_final_is_compared_in_the_rounds_that_it_took(contender):
    import suite

    best, early = contender("whole", 2.0), contender("eager")
    best.ranking, early.ranking, early.times = [3.0] * suite.RANKING_ROUNDS, [6.0] * suite.RANKING_ROUNDS, []
    row = suite.rows_of([best, early], {})[1]
    assert (float(row["ratio"]), float(row["ms_50"]), row["rounds"]) == (0.5, 6.0, suite.RANKING_ROUNDS)


def test_a_loss_that_is_not_finite_shows(contender):
    import suite

    eager = contender("eager", losses=(1.0, 2.0))
    assert suite.loss_difference(contender("whole", losses=(1.0, 2.2)), eager) == pytest.approx(0.1)
    assert math.isnan(suite.loss_difference(contender("whole", losses=(1.0, math.nan)), eager))


def test_groups_fit_the_memory_and_leave_no_model_out():
    import suite
    from suite_models import SUITE

    wanted = {name: list(workload.variants) for name, workload in SUITE.items()}
    groups = list(suite.grouped(list(SUITE.values()), wanted))
    assert [workload for group in groups for workload in group] == list(SUITE.values())
    for group in groups:
        counts = [len(wanted[workload.name]) + 1 for workload in group]
        gib = sum(count * workload.gib for count, workload in zip(counts, group, strict=True))
        assert sum(counts) <= suite.PROCESSES
        assert gib <= suite.GPU_GIB


def test_reasons_name_no_paths_of_a_machine():
    import suite

    assert suite.short("Error in /some/where/file.py:\n  line 3") == "Error in file.py: line 3"
