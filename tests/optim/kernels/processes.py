"""Tests of kernels that need a process of their own: Triton chooses its interpreter when it is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

every_case = pytest.mark.parametrize(
    ("chosen", "profile"),
    [("not slow", "gradweave"), pytest.param("slow or not slow", "thorough", marks=pytest.mark.slow)],
    ids=["some", "all"],
)


def run(arguments, **environment):
    """Run Python in another process; return its output if it fails."""
    tests = HERE.parents[1]
    paths = [str(tests.parent / "src"), str(tests), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(paths), **environment}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=1700)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def interpreted(cases, chosen, profile):
    """Run the tests of a file in Triton's interpreter; return the output if one fails."""
    options = ["-q", "-x", "-p", "no:cacheprovider", "-m", chosen]
    return run(["-m", "pytest", *options, str(HERE / cases)], TRITON_INTERPRET="1", HYPOTHESIS_PROFILE=profile)
