"""Steps in Triton kernels: in the interpreter, which has to be chosen before Triton is imported, and compiled."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
HERE = Path(__file__).parent


def run(arguments, **environment):
    """Runs Python beside this process; returns what it said if it failed."""
    tests = HERE.parent
    paths = [str(tests.parent / "src"), str(tests), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(paths), **environment}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=560)
    return "" if done.returncode == 0 else done.stdout + done.stderr


@pytest.mark.timeout(600)
def test_steps_in_the_interpreter_are_those_without_kernels():
    failure = run(["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(HERE / "fused_cases.py")],
                  TRITON_INTERPRET="1")  # fmt: skip
    assert not failure, failure


@pytest.mark.timeout(600)
def test_kernels_compile_for_a_gpu_that_is_not_here(tmp_path):
    failure = run([str(HERE / "compiled_kernels.py")], TRITON_CACHE_DIR=str(tmp_path))
    assert not failure, failure
