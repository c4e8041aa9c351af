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
    assert (status, err) == (0, "")
    assert "…" not in out
    for word in ("fused (again)", "backward", "forward", "same", "two runs of fused differed"):
        assert word in out
    assert {path.name for path in tmp_path.iterdir()} == {
        "report.html", "figures.json", "step-times.png", "losses.png", "timelines.png", "timelines.json",
    }  # fmt: skip
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert [r["mode"] for r in figures["results"]] == ["fused", "fused (again)", "backward", "forward"]


def test_json(gradweave):
    status, out, _ = gradweave(
        "--model", "autoencoder", "--device", "cpu", "--steps", "20", "--modes", "forward", "--json"
    )
    assert status == 0
    assert json.loads(out)["results"][-1]["identical"] is True


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
        (
            ["--steps", "20", "--model", "autoencoder", "--modes", "forward", "--out", "/dev/null/x"],
            "--out='/dev/null/x'",
        ),
    ],
)
def test_mistakes_are_one_line_and_status_2(gradweave, arguments, message):
    status, out, err = (
        gradweave("--device", "cpu", *arguments) if "--device" not in arguments else gradweave(*arguments)
    )
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert message in err


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
