"""Two real ranks with K-FAC, FOOF and Shampoo: moments are those of the whole batch, exchanged when used."""

from ranks import run_ranks

WORKER = """
import sys
import torch
from torch import nn
import torch.distributed as dist
from gradweave.optim import FOOF, KFAC, Shampoo
from optim.models import make_mlp, rows, train, weights
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

def make_conv():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3)).double()

def images(count):
    generator = torch.Generator().manual_seed(6)
    return [torch.randn(6, 2, 4, 4, generator=generator, dtype=torch.float64) for _ in range(count)]

def run(cls, make, batches, distributed, named):
    model = make()
    inner = model
    options = {"refresh": 2, "lr": 0.02}
    if distributed and named:
        optimizer = cls(model, process_group=dist.group.WORLD, **options)
        model = nn.parallel.DistributedDataParallel(model)
    else:
        if distributed:
            model = nn.parallel.DistributedDataParallel(model)
        alone = {} if distributed or cls is Shampoo else {"process_group": None}
        optimizer = cls(model, **options, **alone)
    calls.clear()
    train(model, optimizer, [x.chunk(2)[rank] if distributed else x for x in batches])
    return weights(inner), len(calls)

results = []
for make, batches in ((lambda: make_mlp(torch.float64), rows(5, dtype=torch.float64)), (make_conv, images(5))):
    for cls in (KFAC, FOOF, Shampoo):
        expected, count = run(cls, make, batches, False, False)
        assert count == 0, count
        for named in (False, True) if cls is not Shampoo else (False,):
            result, count = run(cls, make, batches, True, named)
            assert count == (0 if cls is Shampoo else 3), count  # steps 1, 3 and 5 have new inverses
            assert torch.allclose(result, expected, rtol=1e-7, atol=1e-9), (cls, (result - expected).abs().max())
            results.append(result)
agree_and_leave([torch.cat(results)])
"""


def test_two_ranks_train_as_one_on_the_whole_batch(tmp_path):
    run_ranks(WORKER, tmp_path / "store")
