"""Statistics of layers by Triton kernels, in the interpreter: the cases are in gpu_statistics_cases.py."""

import pytest

from optim.kernels.processes import every_case, interpreted

pytest.importorskip("triton")


@pytest.mark.timeout(1800)
@every_case
def test_statistics_in_the_interpreter_are_those_without_kernels(chosen, profile):
    failure = interpreted("gpu_statistics_cases.py", chosen, profile)
    assert not failure, failure
