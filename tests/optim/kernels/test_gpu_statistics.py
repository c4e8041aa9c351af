"""Sums in Triton kernels, in the interpreter: that has to be chosen before Triton is imported."""

import pytest

from optim.kernels.test_step import every_case, interpreted

pytest.importorskip("triton")


@pytest.mark.timeout(1800)
@every_case
def test_sums_in_the_interpreter_are_those_without_kernels(chosen, profile):
    failure = interpreted("gpu_statistics_cases.py", chosen, profile)
    assert not failure, failure
