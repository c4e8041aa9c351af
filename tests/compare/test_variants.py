"""The ways to train that are compared."""

import pytest
import torch

from compare.own import own, small
from gradweave.compare import compare
from gradweave.compare.figures import save_figures
from gradweave.compare.report import save_report
from gradweave.compare.trial import Setting
from gradweave.compare.workloads import WORKLOADS
from gradweave.errors import ArgumentError


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


def test_the_rate_given_is_that_of_every_row_of_the_same_rule():
    compared = compare(Setting(own(small), lr=0.02, other_lr=0.005), ["loop", "hook", "forward", "eva"], steps=20)
    assert [r.learning_rate for r in compared.results] == [0.02] * 5 + [0.005]
    assert [r["learning_rate"] for r in compared.as_dict()["results"]] == [0.02] * 5 + [0.005]
    assert "adamw at lr 0.02" in compared.title
    usual = Setting(WORKLOADS["autoencoder"])
    assert [usual.learning_rate("fused"), usual.learning_rate("eva")] == [3e-3, None]


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
