"""What DDP sends in a step of the DASO race, by the size of its buckets."""

from pathlib import Path

from ranks import run_ranks

RANK = """
import os
import sys

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, sys.argv[3])
from daso_nodes import WIDTH
from daso_worker import make_model

dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=0, world_size=1)
x, y = torch.randn(4, 784), torch.randint(10, (4,))


def messages(megabytes):
    model = DistributedDataParallel(make_model(WIDTH), bucket_cap_mb=megabytes)
    for _ in range(3):
        functional.cross_entropy(model(x), y).backward()
    return [int(size) for size in model._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(", ")]


first, second, third = (sum(4 * p.numel() for p in make_model(WIDTH)[i].parameters()) for i in (0, 2, 4))
assert [round(size / 1e6, 2) for size in (third + second, first, third)] == [1.07, 1.61, 0.02]
for size in (None, 1, 0.25, 0.05):
    assert messages(size) == [third + second, first], size
assert messages(2) == [third + second + first]
assert messages(0.01) == [third, second, first]
print("ok", flush=True)
os._exit(0)
"""


def test_buckets_smaller_than_the_default_would_divide_the_large_layers_no_further(tmp_path, scripts):
    import daso_nodes

    run_ranks(RANK, tmp_path / "store", str(Path(daso_nodes.__file__).parent), count=1)
