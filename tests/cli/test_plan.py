import json
import subprocess
import sys

from gradweave.cli.plan import _on
from gradweave.schedule import Costs, plan, single


def run(*arguments):
    command = [sys.executable, "-W", "ignore", "-m", "gradweave", "plan", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_costs_and_predictions_of_a_small_model(tmp_path):
    result = run("--model", "autoencoder", "--batch", "64", "--out", str(tmp_path / "made"))
    assert result.returncode == 0, result.stderr
    for policy in ("in_order", "side_stream", "joint", "cross_step"):
        assert policy in result.stdout
    assert "a stock step took" in result.stdout
    assert "a CPU has no second stream" in result.stdout
    assert "warming up" in result.stderr
    costs = Costs.load(tmp_path / "made" / "costs.json")
    assert len(costs.layers) >= 8
    assert all(layer.forward > 0 and layer.weight_grad > 0 and layer.update > 0 for layer in costs.layers)
    assert json.loads((tmp_path / "made" / "costs.json").read_text())["name"] == costs.name
    for name in ("timelines.png", "predicted-and-measured.png"):
        assert (tmp_path / "made" / name).stat().st_size > 10_000


def test_what_is_wrong_is_one_line():
    result = run("--model", "mlp", "--dtype", "float8")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: --dtype='float8'")
    assert result.stderr.count("\n") == 1


def test_lanes_are_called_after_what_was_measured():
    predicted = plan(single(Costs.uniform(3), steps=2), policy="side_stream").simulate()
    on_cpu = _on("cpu", predicted)
    assert [name for name, _ in on_cpu.lanes] == ["cpu main", "cpu side"]
    assert {span.lane for span in on_cpu.spans} == {"cpu main", "cpu side"}
    assert (on_cpu.step_time, on_cpu.busy) == (predicted.step_time, {
        name.replace("gpu0", "cpu"): share for name, share in predicted.busy.items()
    })  # fmt: skip
    assert _on("cuda", predicted) is predicted


def test_a_folder_that_cannot_be_written_to_is_refused_before_measuring(tmp_path):
    (tmp_path / "costs.json").mkdir()
    result = run("--model", "autoencoder", "--out", str(tmp_path))
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == f"error: --out='{tmp_path}': costs.json in it is a folder; give another\n"
