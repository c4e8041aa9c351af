"""Steps in Triton kernels, in the interpreter: the cases are in step_cases.py."""

import pytest

from optim.kernels.processes import every_case, interpreted

pytest.importorskip("triton")


@pytest.mark.timeout(1800)
@every_case
def test_steps_in_the_interpreter_are_those_without_kernels(chosen, profile):
    failure = interpreted("step_cases.py", chosen, profile)
    assert not failure, failure
