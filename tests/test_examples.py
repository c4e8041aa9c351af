"""Each script of examples/ does what its first line says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from worlds import free_port

EXAMPLES = Path(__file__).parents[1] / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port")


def run(folder, *command):
    """Return what a script prints, started in an empty folder."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent / "src")}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=True
    ).stdout


@pytest.mark.parametrize("ranks", [1, 2])
def test_compile_data_parallel(tmp_path, ranks):
    launcher = (*TORCHRUN, str(free_port())) if ranks == 2 else ()
    script = str(EXAMPLES / "compile_data_parallel.py")
    printed = run(tmp_path, *launcher, script, "--steps", "12", "--lower", "replay")
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in printed.splitlines() if "loss" in line]
    assert losses[-1] < losses[0]
    assert ("2 ranks average" in printed) == (ranks == 2)
    saved = torch.load(tmp_path / "checkpoint.pt")
    assert not any(name.startswith("module.") for name in saved["model"])
    assert saved["optimizer"]["state"]
