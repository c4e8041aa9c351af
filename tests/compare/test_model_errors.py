import sys

import pytest

from gradweave.compare.model_errors import errors_of_model
from gradweave.errors import ArgumentError, GradweaveError


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("some\n  words"), "model='m': fails: ValueError: some words (test_model_errors.py, line "),
        (KeyError(), "model='m': fails: KeyError (test_model_errors.py, line "),
        (RuntimeError("x" * 5000), "xxx ... (test_model_errors.py"),
    ],
)
def test_an_error_of_the_model_is_a_line_with_its_place(error, said):
    with pytest.raises(ArgumentError) as raised, errors_of_model("m", "fails"):
        raise error
    assert said in str(raised.value)
    assert len(str(raised.value)) < 400


def test_leaving_the_process_is_an_error_too():
    with pytest.raises(ArgumentError, match=r"it called sys.exit\(3\)"), errors_of_model("m", "fails"):
        sys.exit(3)


@pytest.mark.parametrize(
    "error", [GradweaveError("ours"), KeyboardInterrupt(), RuntimeError("DefaultCPUAllocator: no"), MemoryError()]
)
def test_ours_the_users_ctrl_c_and_lack_of_memory_pass(error):
    with pytest.raises(type(error)) as raised, errors_of_model("m", "fails"):
        raise error
    assert raised.value is error
