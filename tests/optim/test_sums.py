"""Sums in Triton kernels, in the interpreter: that has to be chosen before Triton is imported."""

import pytest

from optim.test_fused import HERE, run

pytest.importorskip("triton")


@pytest.mark.timeout(600)
def test_sums_in_the_interpreter_are_those_without_kernels():
    failure = run(["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(HERE / "sums_cases.py")],
                  TRITON_INTERPRET="1")  # fmt: skip
    assert not failure, failure
