import json
import sys

import pytest

from gradweave.cli import main
from gradweave.cli.plan import _on
from gradweave.schedule import Costs, plan, single


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command; return its status, output and errors."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["gradweave", "plan", *arguments])
        with pytest.raises(SystemExit) as exit_:
            main()
        return exit_.value.code, *capsys.readouterr()

    return run


def test_costs_and_predictions_of_a_small_model(run, tmp_path):
    status, out, err = run("--model", "autoencoder", "--batch", "64", "--out", str(tmp_path / "made"))
    assert status == 0, err
    for policy in ("in_order", "side_stream", "joint", "cross_step"):
        assert policy in out
    assert "a stock step took" in out
    assert "a CPU has no second stream" in out
    assert "warming up" in err
    costs = Costs.load(tmp_path / "made" / "costs.json")
    assert len(costs.layers) >= 8
    assert all(layer.forward > 0 and layer.weight_grad > 0 and layer.update > 0 for layer in costs.layers)
    assert json.loads((tmp_path / "made" / "costs.json").read_text())["name"] == costs.name
    for name in ("timelines.png", "predicted-and-measured.png"):
        assert (tmp_path / "made" / name).stat().st_size > 10_000


def test_what_is_wrong_is_one_line(run):
    status, out, err = run("--model", "mlp", "--dtype", "float8")
    assert (status, out) == (2, "")
    assert err.startswith("error: --dtype='float8'")
    assert err.count("\n") == 1


def test_lanes_are_called_after_what_was_measured():
    predicted = plan(single(Costs.uniform(3), steps=2), policy="side_stream").simulate()
    on_cpu = _on("cpu", predicted)
    assert [name for name, _ in on_cpu.lanes] == ["cpu main", "cpu side"]
    assert {span.lane for span in on_cpu.spans} == {"cpu main", "cpu side"}
    assert (on_cpu.step_time, on_cpu.busy) == (predicted.step_time, {
        name.replace("gpu0", "cpu"): share for name, share in predicted.busy.items()
    })  # fmt: skip
    assert _on("cuda", predicted) is predicted


def test_a_folder_that_cannot_be_written_to_is_refused_before_measuring(run, tmp_path):
    (tmp_path / "costs.json").mkdir()
    status, out, err = run("--model", "autoencoder", "--out", str(tmp_path))
    assert (status, out) == (2, "")
    assert err == f"error: --out='{tmp_path}': costs.json in it is a folder; give another folder\n"
