import json
import math

import pytest
import torch
from torch import nn

from gradweave.compare import compare
from gradweave.compare.figures import _on_one_axis, save_figures
from gradweave.compare.report import save_report
from gradweave.compare.trial import Setting
from gradweave.compare.workloads import WORKLOADS, Workload
from gradweave.errors import ArgumentError, GradweaveError

together = pytest.mark.xdist_group("comparison")
"""Tests in one process, so that the comparison is made once."""


@pytest.fixture(scope="module")
def comparison():
    return compare(
        Setting(WORKLOADS["autoencoder"], batch=64),
        ["loop", "hook", "backward", "forward", "reorder", "daso", "data_parallel"],
        steps=20,
    )


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


@together
def test_the_verdict_is_one_sentence_that_names_the_noise(comparison):
    assert comparison.verdict.endswith(".")
    assert "two runs of fused differed by" in comparison.verdict


@together
def test_a_wrong_result_is_the_verdict(comparison):
    from dataclasses import replace

    spoilt = tuple(replace(r, difference=0.1) if r.label == "forward" else r for r in comparison.results)
    verdict = replace(comparison, results=spoilt).verdict
    assert verdict.startswith("forward did not train as fused did: do not use it")


@together
def test_figures_and_a_report_that_needs_nothing_else(comparison, tmp_path):
    paths = save_figures(comparison, tmp_path)
    assert all(path.stat().st_size > 5000 for path in paths)
    save_report(comparison, paths, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 3
    assert "http" not in page.replace("http-equiv", "")
    assert "identical" in page
    assert comparison.title in page
    assert "autoencoder (364,240 parameters), adamw at lr 0.003, batch 64, float32" in page
    assert "of 86 steps: 60 to settle, 20 timed" in page
    save_report(comparison, paths, tmp_path / "report.html", "gradweave compare <x>")
    assert "<code>gradweave compare &lt;x&gt;</code>" in (tmp_path / "report.html").read_text()
    json.dumps(comparison.as_dict(), allow_nan=False)


@together
def test_every_timeline_begins_at_its_first_step_and_slow_ones_shrink_no_other(comparison):
    from dataclasses import replace

    timelines = [trial.timeline for trial in comparison.trials]
    assert all(min(span.start for span in timeline.spans) == 0.0 for timeline in timelines)
    slow = tuple(span._replace(start=10 * span.start, end=10 * span.end) for span in timelines[0].spans)
    shown = _on_one_axis([replace(timelines[0], spans=slow), timelines[0]])
    assert {span.task.step for span in shown[0].spans} == {0, 1}
    assert shown[0].title == "fused (first 2 of 6 steps)"
    assert shown[1] == timelines[0]


def test_an_optimizer_without_a_fused_form_is_compared_with_foreach():
    result = compare(Setting(WORKLOADS["autoencoder"], "rmsprop", batch=256), ["forward"], steps=20)
    assert [r.label for r in result.results] == ["foreach", "foreach (again)", "forward"]
    assert result.results[-1].identical


def test_clipping_is_the_same_in_every_mode():
    setting = Setting(WORKLOADS["autoencoder"], batch=256, max_norm=0.01)
    result = compare(setting, ["forward"], steps=20)
    assert result.results[-1].identical
    assert "clipped to 0.01" in result.title
    free = compare(Setting(WORKLOADS["autoencoder"], batch=256), ["forward"], steps=20)
    assert free.results[0].losses[-1] != result.results[0].losses[-1]


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


def test_random_numbers_of_variants_do_not_mix():
    def model():
        return nn.Sequential(nn.Linear(64, 32), nn.Dropout(0.5), nn.Linear(32, 64))

    base = WORKLOADS["autoencoder"]
    workload = Workload("dropout", model, base.make_data, base.loss)
    result = compare(Setting(workload, batch=256), ["backward", "forward"], steps=20)
    assert all(r.identical for r in result.results)
    assert torch.is_tensor(result.trials[0].model[0].weight)


def test_a_compiled_step_is_judged_by_its_losses(tmp_path):
    from dataclasses import replace

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


def test_another_rule_is_judged_by_time_and_loss(tmp_path):
    compared = compare(Setting(WORKLOADS["autoencoder"], batch=64), ["forward", "eva_f"], steps=20)
    baseline, _, forward, other = compared.results
    assert (forward.sameness, other.label) == ("same", "eva_f")
    assert other.difference > 0
    assert other.sameness == f"loss {other.last_loss:.3g}"
    assert "identical weights" in compared.verdict
    assert f"fused has a loss of {baseline.last_loss:.3g}" in compared.verdict
    assert f"eva_f {other.last_loss:.3g}" in compared.verdict
    save_report(compared, save_figures(compared, tmp_path), tmp_path / "report.html")
    assert "Eva-f" in (tmp_path / "report.html").read_text()


def test_a_pipeline_of_one_process_is_judged_by_its_losses(tmp_path):
    compared = compare(Setting(WORKLOADS["autoencoder"], batch=64, max_norm=1.0), ["pipeline"], steps=20)
    result = compared.results[2]
    assert (result.label, result.parts) == ("pipeline", {})
    assert result.loss_difference < 1e-5
    assert "pipeline did not" not in compared.verdict
    save_report(compared, save_figures(compared, tmp_path), tmp_path / "report.html")
    assert not torch.distributed.is_initialized()


def test_a_pipeline_in_bfloat16_runs_its_layers_in_it():
    setting = Setting(WORKLOADS["autoencoder"], batch=64, dtype=torch.bfloat16)
    compared = compare(setting, ["pipeline"], steps=20)
    assert "pipeline did not" not in compared.verdict


def test_a_model_that_is_no_sequence_is_refused_and_leaves_no_process_group():
    with pytest.raises(ArgumentError, match="Sequential"):
        compare(Setting(WORKLOADS["gpt_small"], batch=8), ["pipeline"], steps=20)
    assert not torch.distributed.is_initialized()


def own(make_model, make_data=None):
    base = WORKLOADS["autoencoder"]
    return Workload("own", make_model, make_data or base.make_data, base.loss)


def small():
    return nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 64))


class Spoilt(nn.Module):
    """Returns NaN after a number of calls."""

    def __init__(self, calls):
        super().__init__()
        self.inner, self.left = small(), calls

    def forward(self, x):
        self.left -= 1
        return self.inner(x) * (1.0 if self.left >= 0 else math.nan)


def test_the_rate_given_is_that_of_every_row_of_the_same_rule():
    compared = compare(Setting(own(small), lr=0.02, other_lr=0.005), ["loop", "hook", "forward", "eva"], steps=20)
    assert [r.learning_rate for r in compared.results] == [0.02] * 5 + [0.005]
    assert [r["learning_rate"] for r in compared.as_dict()["results"]] == [0.02] * 5 + [0.005]
    assert "adamw at lr 0.02" in compared.title
    usual = Setting(WORKLOADS["autoencoder"])
    assert [usual.learning_rate("fused"), usual.learning_rate("eva")] == [3e-3, None]


def test_the_samples_that_are_there_are_counted_whatever_was_asked_for():
    def few(batch, generator):
        assert batch == 32
        return [(torch.rand(n, 64), torch.rand(n, 64)) for n in (5, 7)]

    compared = compare(Setting(own(small, few)), ["forward"], steps=20)
    assert compared.samples == (5, 7)
    assert "batches of 5 to 7" in compared.title
    for result in compared.results:
        assert result.throughput == pytest.approx(6 / result.milliseconds[1] * 1e3)


def test_partly_frozen_models_train_in_every_mode():
    def half_frozen():
        model = small()
        model[0].requires_grad_(False)
        return model

    compared = compare(Setting(own(half_frozen)), ["hook", "backward", "forward"], steps=20)
    assert all(result.identical for result in compared.results)
    assert compared.parameters == 8 * 64 + 64


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        (own(lambda: small().requires_grad_(False)), "model='own': has no parameters to train, or all are frozen"),
        (own(nn.ReLU), "has no parameters to train"),
        (own(lambda: 1 / 0), "cannot be built: ZeroDivisionError"),
        (own(lambda: nn.Linear(7, 7)), "fails in a training step: RuntimeError: mat1 and mat2"),
        (own(small, lambda *_: []), "makes no batch of 32 samples"),
        (own(small, lambda *_: 1 / 0), "its data cannot be made: ZeroDivisionError"),
        (own(lambda: Spoilt(4)), "the loss of step 5 of stock training is nan: nothing can be compared"),
        (own(lambda: Spoilt(33)), "the loss of step 34 of stock training is nan"),
    ],
)
def test_what_is_wrong_with_a_model_is_an_error_of_it(workload, message):
    with pytest.raises(GradweaveError) as error:
        compare(Setting(workload), ["forward"], steps=20)
    assert message in str(error.value)


def test_a_row_that_breaks_down_is_named_and_the_others_stay():
    compared = compare(Setting(own(small), other_lr=1e30), ["forward", "eva"], steps=20)
    assert not compared.is_finite
    assert compared.results[-1].sameness == "not finite"
    assert compared.verdict.startswith("eva at lr 1e+30 broke down")
    assert "it gives identical weights" in compared.verdict
    json.dumps(compared.as_dict(), allow_nan=False)


def test_the_rule_of_auto_stands_beside_its_times(tmp_path):
    pages = []
    for mode in ("auto", "forward"):
        compared = compare(Setting(own(small)), [mode], steps=20)
        save_report(compared, save_figures(compared, tmp_path), tmp_path / "report.html")
        pages.append((tmp_path / "report.html").read_text())
    rule = "at least 3% faster in the median, and faster in every one of its own rounds"
    assert [rule in page for page in pages] == [True, False]
