import html
import json
import sys

import pytest
import torch

from gradweave.cli.app import main


@pytest.fixture
def gradweave(monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["gradweave", "compare", *arguments])
        with pytest.raises(SystemExit) as exit_:
            main()
        captured = capsys.readouterr()
        return exit_.value.code, captured.out, captured.err

    return run


def test_a_table_a_verdict_and_a_folder(gradweave, tmp_path):
    status, out, err = gradweave(
        "--model",
        "autoencoder",
        "--device",
        "cpu",
        "--steps",
        "20",
        "--modes",
        "backward,forward",
        "--out",
        str(tmp_path),
    )
    assert status == 0
    assert err.startswith("building models, 0% done\nwarming up fused, 0% done\n")
    assert all(" done" in line for line in err.splitlines())
    assert "…" not in out
    for word in ("fused (again)", "backward", "forward", "same", "two runs of fused differed", "0.003", "364,240"):
        assert word in out
    assert {path.name for path in tmp_path.iterdir()} == {
        "report.html", "figures.json", "step-times.png", "losses.png", "timelines.png", "timelines.json",
    }  # fmt: skip
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert [r["mode"] for r in figures["results"]] == ["fused", "fused (again)", "backward", "forward"]
    assert figures["command"].startswith("gradweave compare --model autoencoder")
    assert figures["command"] in html.unescape((tmp_path / "report.html").read_text())


def test_json(gradweave):
    status, out, err = gradweave(
        "--model", "autoencoder", "--device", "cpu", "--steps", "20", "--modes", "forward", "--lr", "0.02", "--json"
    )
    assert (status, err) == (0, "")
    assert json.loads(out)["results"][-1]["identical"] is True
    assert [row["learning_rate"] for row in json.loads(out)["results"]] == [0.02] * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nonsense"], "--model='nonsense'"),
        (["--modes", "sideways"], "--modes='sideways'"),
        (["--optimizer", "lion"], "--optimizer='lion'"),
        (["--dtype", "int8"], "--dtype='int8'"),
        (["--dtype", "float16"], "gradient scaling"),
        (["--device", "toaster"], "--device='toaster'"),
        (["--device", "meta"], "--device='meta'"),
        (["--steps", "1"], "--steps=1"),
        (["--batch", "0"], "--batch=0"),
        (["--modes", "backward", "--max-norm", "1"], "cannot clip by norm"),
        (["--max-norm", "-1"], "--max-norm=-1.0: give a number above 0"),
        (["--max-norm", "nan"], "--max-norm=nan"),
        (["--lr", "nan"], "--lr=nan"),
        (["--batch", "100000"], "--batch=100000: there are only 1,797 samples"),
    ],
)
def test_mistakes_are_one_line_and_status_2(gradweave, arguments, message):
    status, out, err = (
        gradweave("--device", "cpu", *arguments) if "--device" not in arguments else gradweave(*arguments)
    )
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert message in err


@pytest.fixture
def never_trains(monkeypatch):
    monkeypatch.setattr("gradweave.compare.run.compare", None)


def test_a_folder_that_cannot_be_written_to_is_refused_before_training(gradweave, never_trains, tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "made" / "report.html").mkdir(parents=True)
    for out, reason in (
        ("/dev/null/x", "cannot be written to"),
        (tmp_path / "file", "cannot be written to"),
        (tmp_path / "made", "report.html in it is a folder"),
    ):
        status, printed, err = gradweave("--out", str(out))
        assert (status, printed) == (2, "")
        assert err.startswith(f"error: --out='{out}': {reason}")
        assert len(err.splitlines()) == 1


MODULE = """
import math, sys
from torch import nn
from gradweave.compare import WORKLOADS, Workload

base = WORKLOADS["autoencoder"]

def small():
    return nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 64))

def mine():
    return Workload("mine", small, base.make_data, base.loss)

def frozen():
    return Workload("mine", lambda: small().requires_grad_(False), base.make_data, base.loss)

def breaking():
    return Workload("mine", small, base.make_data, lambda a, b: base.loss(a, b) * math.nan)
"""


def test_a_module_in_the_current_folder_is_found_and_what_it_does_wrong_is_a_line(gradweave, tmp_path, monkeypatch):
    (tmp_path / "some_local_models.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.delitem(sys.modules, "some_local_models", raising=False)
    shown = ("--device", "cpu", "--steps", "20", "--model")
    status, out, _ = gradweave(*shown, "some_local_models:mine", "--modes", "forward")
    assert status == 0
    assert "mine (1,096 parameters)" in out
    status, out, err = gradweave(*shown, "some_local_models:frozen", "--modes", "forward")
    assert (status, out, err.splitlines()[-1]) == (
        2, "", "error: model='mine': has no parameters to train, or all are frozen"
    )  # fmt: skip
    status, out, err = gradweave(*shown, "some_local_models:breaking", "--modes", "forward")
    assert (status, out) == (2, "")
    assert "the loss of step 1 of stock training is nan" in err.splitlines()[-1]
    status, out, _ = gradweave(*shown, "some_local_models:mine", "--modes", "forward,eva", "--eva-lr", "1e30")
    assert status == 1
    assert "not finite" in out
    assert "eva at lr 1e+30 broke down" in out


def test_figures_that_cannot_be_written_are_still_shown(gradweave, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gradweave.compare.figures.save_figures", full)
    status, out, err = gradweave(
        "--model", "autoencoder", "--device", "cpu", "--steps", "20", "--modes", "forward", "--out", str(tmp_path)
    )
    assert status == 2
    assert "two runs of fused differed" in out
    assert err.splitlines()[-1] == f"error: --out='{tmp_path}': cannot be written to: No space left on device"


def test_help_names_models_modes_and_optimizers(gradweave, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    status, out, _ = gradweave("--help")
    assert status == 0
    for word in ("gpt_small", "mobilenet_v2", "data_parallel", "eva_s", "adadelta", "--lr", "--eva-lr"):
        assert word in out


NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def test_a_batch_that_does_not_fit_is_one_line(gradweave, device, request):
    rows = "1000000000000"
    if device == "cuda":
        rows = "512"
        torch.cuda.set_per_process_memory_fraction(0.02)
        request.addfinalizer(lambda: torch.cuda.set_per_process_memory_fraction(1.0))
    status, out, err = gradweave("--model", "resnet18", "--device", device, "--batch", rows, "--steps", "20")
    assert (status, out) == (2, "")
    assert f"--batch={rows}: does not fit into memory" in err
    assert len(err.splitlines()) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_gpu_is_named(gradweave):
    status, _, err = gradweave("--device", "cuda")
    assert status == 2
    assert "--device='cuda': there is no CUDA device" in err
