"""Two real ranks: over which ranks vectors are averaged, in whichever order things are made, and who is refused."""

import pytest

from gradweave.errors import ArgumentError
from gradweave.optim import Eva, EvaF
from optim.models import loss_of, make_mlp, rows
from ranks import run_ranks

OF_ONE_LAUNCH = """
import sys
from optim import ranks_runs
ranks_runs.run_all(int(sys.argv[1]), sys.argv[2])
"""


def test_two_ranks(tmp_path):
    run_ranks(OF_ONE_LAUNCH, tmp_path / "store")


@pytest.mark.parametrize("cls", [Eva, EvaF])
def test_groups_that_are_none(cls):
    with pytest.raises(ArgumentError, match=r"process_group='world'.*leave it out"):
        cls(make_mlp(), process_group="world")
    with pytest.raises(ArgumentError, match="init_process_group"):
        cls(make_mlp(), process_group=object())


def test_one_process_averages_nothing():
    model = make_mlp()
    optimizer = Eva(model)
    loss_of(model, rows(1)[0]).backward()
    optimizer.step()
    assert optimizer.ranks.group() is None


ON_THE_WHOLE_BATCH = """
import sys
import torch
from torch import nn
import torch.distributed as dist
from gradweave.optim import Eva, EvaF, EvaS
from optim.models import loss_of, make_conv, make_mlp, rows, train, weights
from ranks import agree_and_leave

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
calls = []
original = dist.all_reduce


def counting(tensor, *args, **more):
    if tensor.is_floating_point():  # the comparison of ranks is of whole numbers
        calls.append(1)
    return original(tensor, *args, **more)


dist.all_reduce = counting

def run(cls, options, distributed, named):
    model = make_mlp(torch.float64)
    inner = model
    if distributed and named:
        optimizer = cls(model, process_group=dist.group.WORLD, **options)
        model = nn.parallel.DistributedDataParallel(model)
    else:
        if distributed:
            model = nn.parallel.DistributedDataParallel(model)
        alone = {} if distributed or cls is EvaS else {"process_group": None}
        optimizer = cls(model, **options, **alone)
    batches = rows(5, dtype=torch.float64)
    calls.clear()
    train(model, optimizer, [x.chunk(2)[rank] if distributed else x for x in batches])
    return weights(inner), [optimizer.state[p].get("input_vector") for p in inner.parameters()]

faithful = {"faithful": True, "lr": 0.02}
ends = []
for cls, options in ((EvaF, {}), (EvaF, faithful), (Eva, faithful), (EvaS, {})):
    expected, vectors = run(cls, options, False, False)
    assert not calls
    for named in (False, True) if cls is not EvaS else (False,):
        result, others = run(cls, options, True, named)
        assert len(calls) == (0 if cls is EvaS else 5), len(calls)
        assert torch.allclose(result, expected, rtol=1e-7, atol=1e-9), (cls, (result - expected).abs().max())
        for one, other in zip(vectors, others):
            assert one is None or torch.allclose(one, other)
        ends.append(result)
# Our Eva looks at other samples on each rank than one process would: ranks must agree among themselves.
result, _ = run(Eva, {}, True, False)
agree_and_leave([result])
"""


def test_two_ranks_train_as_one_on_the_whole_batch(tmp_path):
    run_ranks(ON_THE_WHOLE_BATCH, tmp_path / "store")
