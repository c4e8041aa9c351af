"""Torch's own schedules as programs."""

import pytest

from gradweave._compat.pipelining import torch_program


@pytest.mark.parametrize("name", ["interleaved", "interleaved_zero_bubble"])
def test_each_stage_does_everything_once_for_each_micro_batch(name):
    ranks, stages, microbatches = 2, 2, 4
    program = torch_program(name, ranks, stages, microbatches)
    assert len(program) == ranks
    done = [action for order in program for action in order]
    assert len(done) == len(set(done))
    forwards = {(stage, number) for kind, stage, number in done if kind == "F"}
    assert forwards == {(stage, number) for stage in range(ranks * stages) for number in range(microbatches)}
    gradients = {(stage, number) for kind, stage, number in done if kind in "XB"}
    assert gradients == forwards
    weights = {(stage, number) for kind, stage, number in done if kind in "WB"}
    assert weights == forwards


def test_numbers_that_a_schedule_does_not_allow_are_torchs_error():
    with pytest.raises(ValueError, match="microbatches"):
        torch_program("interleaved", 4, 2, 9)
