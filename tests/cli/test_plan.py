import json
import subprocess
import sys

from gradweave.schedule.costs import Costs


def run(*arguments):
    command = [sys.executable, "-W", "ignore", "-m", "gradweave", "plan", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_costs_and_predictions_of_a_small_model(tmp_path):
    result = run("--model", "autoencoder", "--batch", "64", "--out", str(tmp_path / "made"))
    assert result.returncode == 0, result.stderr
    for policy in ("in_order", "side_stream", "joint", "cross_step"):
        assert policy in result.stdout
    assert "a stock step took" in result.stdout
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
