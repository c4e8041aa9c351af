"""Two real ranks: over whom vectors are averaged, in whichever order things are made, and who is refused."""

import pytest

from gradweave.errors import ArgumentError
from gradweave.optim import Eva, EvaF
from optim.models import loss_of, make_mlp, rows
from ranks import run_ranks

WORKER = """
import sys
from optim import ranks_runs
ranks_runs.run_all(int(sys.argv[1]), sys.argv[2])
"""


def test_two_ranks(tmp_path):
    run_ranks(WORKER, tmp_path / "store")


@pytest.mark.parametrize("cls", [Eva, EvaF])
def test_groups_that_are_none(cls):
    with pytest.raises(ArgumentError, match=r"process_group='world'.*leave it out"):
        cls(make_mlp(), process_group="world")
    with pytest.raises(ArgumentError, match="init_process_group"):
        cls(make_mlp(), process_group=object())


def test_one_process_averages_with_nobody():
    model = make_mlp()
    optimizer = Eva(model)
    loss_of(model, rows(1)[0]).backward()
    optimizer.step()
    assert optimizer.ranks.group() is None
