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
    tests = HERE.parents[1]
    paths = [str(tests.parent / "src"), str(tests), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(paths), **environment}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=1700)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def interpreted(cases, chosen, profile):
    """Runs cases in Triton's interpreter, in a process of their own."""
    options = ["-q", "-x", "-p", "no:cacheprovider", "-m", chosen]
    return run(["-m", "pytest", *options, str(HERE / cases)], TRITON_INTERPRET="1", HYPOTHESIS_PROFILE=profile)


every_case = pytest.mark.parametrize(
    ("chosen", "profile"),
    [("not slow", "gradweave"), pytest.param("slow or not slow", "thorough", marks=pytest.mark.slow)],
    ids=["some", "all"],
)


@pytest.mark.timeout(1800)
@every_case
def test_steps_in_the_interpreter_are_those_without_kernels(chosen, profile):
    failure = interpreted("step_cases.py", chosen, profile)
    assert not failure, failure


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtypes", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_kernels_compile_for_a_gpu_that_is_not_here(tmp_path, dtypes):
    failure = run([str(HERE / "compiled_kernels.py"), dtypes], TRITON_CACHE_DIR=str(tmp_path))
    assert not failure, failure
