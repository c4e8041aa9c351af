"""What a comparison says as a whole: the verdict over its rows."""

import json
from dataclasses import replace

from compare.own import own, small
from compare.sharing import together
from gradweave.compare import compare
from gradweave.compare.figures import save_figures
from gradweave.compare.report import save_report
from gradweave.compare.trial import Setting
from gradweave.compare.workloads import WORKLOADS


@together
def test_a_wrong_result_is_the_verdict(comparison):
    spoilt = tuple(replace(r, difference=0.1) if r.label == "forward" else r for r in comparison.results)
    verdict = replace(comparison, results=spoilt).verdict
    assert verdict.startswith("forward did not train as fused did: do not use it")


@together
def test_the_verdict_is_one_sentence_that_names_the_noise(comparison):
    assert comparison.verdict.endswith(".")
    assert "two runs of fused differed by" in comparison.verdict


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


def test_a_row_that_breaks_down_is_named_and_the_others_stay():
    compared = compare(Setting(own(small), other_lr=1e30), ["forward", "eva"], steps=20)
    assert not compared.is_finite
    assert compared.results[-1].sameness == "not finite"
    assert compared.verdict.startswith("eva at lr 1e+30 broke down")
    assert "it gives identical weights" in compared.verdict
    json.dumps(compared.as_dict(), allow_nan=False)
