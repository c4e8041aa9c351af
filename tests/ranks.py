"""Running a script in several real processes."""

import os
import subprocess
import sys
from pathlib import Path

SECONDS = 90


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
