"""Compiled steps on two ranks over NCCL, which share one GPU; over Gloo the same program shows that it can run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from worlds import free_port

PROGRAM = Path(__file__).with_name("nccl_ranks.py")
SECONDS = 240


def trained(backend, device, ways, folder):
    """Run both ranks; return what each has found."""
    port = str(free_port())
    ranks = []
    try:
        for rank in range(2):
            environment = os.environ | {
                "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                "NCCL_HOSTID": f"host {rank}", "NCCL_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
                "XDG_CACHE_HOME": str(folder), "PYTHONPATH": os.pathsep.join(sys.path),
            }  # fmt: skip
            command = [sys.executable, str(PROGRAM), backend, device, ways]
            ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        outputs = [rank.communicate(timeout=SECONDS)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    found = [line.removeprefix("found ") for output in outputs for line in output.splitlines() if "found {" in line]
    assert len(found) == 2, outputs
    return [json.loads(line) for line in found]


def check(found):
    for rank in found:
        for way, (difference, reason) in rank.items():
            assert reason is None, way
            assert difference == 0 if "replay" in way else difference < 1e-5, way


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_two_ranks_over_nccl(tmp_path):
    check(trained("nccl", "cuda", "mlp:replay,gpt:replay,mlp:inductor", tmp_path))


def test_the_same_over_gloo(tmp_path):
    check(trained("gloo", "cpu", "mlp:replay", tmp_path))
