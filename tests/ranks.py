"""Running a script in several real processes."""

import os
import subprocess
import sys
from pathlib import Path

SECONDS = 90


def agree_and_leave(results):
    """In a rank: ends it if all its results are equal, and equal to those of the other ranks."""
    import torch
    import torch.distributed as dist

    for other in results[1:]:
        assert torch.equal(results[0], other), (results[0] - other).abs().max()
    everyone = [torch.empty_like(results[0]) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, results[0])
    assert all(torch.equal(results[0], other) for other in everyone)
    dist.barrier()
    print("ok", flush=True)
    # Leave without joining gloo's threads: torch may abort when a peer has gone first.
    os._exit(0)


def run_ranks(script, store, *arguments, count=2):
    """Runs a script once per rank, as ``script rank store ...``; each must print ok. None is left behind."""
    tests = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": f"{tests.parent / 'src'}:{tests}", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(rank), str(store), *arguments],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(count)
    ]  # fmt: skip
    try:
        for process in ranks:
            out, err = process.communicate(timeout=SECONDS)
            assert process.returncode == 0, err
            assert out == "ok\n"
    finally:
        for process in ranks:
            process.kill()
