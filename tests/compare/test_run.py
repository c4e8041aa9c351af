"""A comparison from one end to the other."""

import math
from dataclasses import replace

import pytest

from compare.own import own, small
from compare.sharing import together
from gradweave.compare import compare
from gradweave.compare.figures import save_figures
from gradweave.compare.report import save_report
from gradweave.compare.trial import Setting
from gradweave.compare.workloads import WORKLOADS
from gradweave.errors import ArgumentError


@together
def test_every_mode_is_measured_beside_the_baseline_and_itself(comparison):
    labels = [result.label for result in comparison.results]
    assert labels[:6] == ["fused", "fused (again)", "loop", "hook", "backward", "forward"]
    assert labels[6:] == ["reorder", "daso", "data_parallel"]
    for result in comparison.results:
        assert result.milliseconds[0] <= result.milliseconds[1] <= result.milliseconds[2]
        assert result.speedup.low <= result.speedup.value <= result.speedup.high
        assert result.throughput == pytest.approx(64 / result.milliseconds[1] * 1e3, rel=0.01)
        assert set(result.parts) == {"forward", "backward", "update"}
    assert comparison.results[0].speedup.value == 1.0
    assert not comparison.results[0].claim
    assert not comparison.results[1].claim


@together
def test_woven_modes_give_identical_weights_and_losses(comparison):
    results = {result.label: result for result in comparison.results}
    for label in ("fused (again)", "backward", "forward", "hook", "reorder", "daso", "data_parallel"):
        assert results[label].identical, label
        assert results[label].losses == results["fused"].losses
    assert len(results["fused"].losses) == 60 + 20 + 6
    assert "a CPU has no second stream" in results["reorder"].description
    assert results["fused"].losses[-1] < results["fused"].losses[0]
    assert results["loop"].difference < 1e-2


@together
def test_timelines_show_updates_where_each_mode_puts_them(comparison):
    timelines = {trial.label: trial.timeline for trial in comparison.trials}

    def kinds(label):
        spans = [span for span in timelines[label].spans if span.task.step == 2]
        return "".join(span.task.kind for span in spans)

    assert kinds("fused") == "FXU"
    assert "XUX" in kinds("backward") or "XUU" in kinds("backward")
    assert kinds("forward").startswith(("FU", "UF"))


@pytest.mark.parametrize(
    ("more", "modes", "steps", "message"),
    [
        ({}, ["sideways"], 40, "--modes='sideways'"),
        (
            {"max_norm": 1.0},
            ["backward"],
            40,
            "--modes='backward': updates before all gradients are known",
        ),
        ({}, ["forward"], 3, "--steps=3: give at least 20"),
        ({"optimizer": "lion"}, ["forward"], 40, "--optimizer='lion'"),
        ({"optimizer": "rmsprop"}, ["fused"], 40, "torch has no fused form of rmsprop"),
        ({"batch": 0}, ["forward"], 40, "--batch=0"),
        ({"batch": 100_000}, ["forward"], 40, "--batch=100000: there are only 1,797 samples"),
        ({"max_norm": -1.0}, ["forward"], 40, "--max-norm=-1.0: give a number above 0"),
        ({"max_norm": 0.0}, ["forward"], 40, "--max-norm=0.0"),
        ({"max_norm": math.nan}, ["forward"], 40, "--max-norm=nan"),
        ({"max_norm": math.inf}, ["forward"], 40, "--max-norm=inf"),
        ({"lr": 0.0}, ["forward"], 40, "--lr=0.0: give a number above 0"),
        ({"lr": math.nan}, ["forward"], 40, "--lr=nan"),
        ({"other_lr": -1.0}, ["eva"], 40, "--eva-lr=-1.0"),
        ({"other_lr": 0.1}, ["forward"], 40, "--eva-lr=0.1: is for eva, eva_f, eva_s"),
    ],
)
def test_mistakes_are_named(more, modes, steps, message):
    with pytest.raises(ArgumentError) as error:
        compare(Setting(**{"workload": WORKLOADS["autoencoder"], **more}), modes, steps=steps)
    assert message in str(error.value)


def test_a_compiled_step_is_judged_by_its_losses(tmp_path):
    compared = compare(Setting(own(small), batch=64), ["compile"], steps=20)
    result = compared.results[2]
    assert result.label == "compile"
    assert result.parts == {}
    assert 0 < result.loss_difference < 1e-5
    assert result.sameness.startswith("loss ")
    assert "compile did not" not in compared.verdict
    save_report(compared, save_figures(compared, tmp_path), tmp_path / "report.html")
    assert "all in one" in (tmp_path / "report.html").read_text()
    spoilt = replace(compared, results=(*compared.results[:2], replace(result, loss_difference=0.01)))
    assert spoilt.verdict.startswith("compile did not train as fused did")
