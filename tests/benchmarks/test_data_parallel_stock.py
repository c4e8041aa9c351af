"""DDP is tuned before it is compared, and every way of the benchmark trains to the same weights."""

import pytest

from ranks import run_ranks


@pytest.fixture
def stock(scripts):
    import data_parallel_stock

    return data_parallel_stock


@pytest.mark.parametrize("best", [1 << 18, 1 << 19, 1 << 20, 2 << 20, 4 << 20, 25 << 20, 50 << 20, 100 << 20])
def test_the_fastest_size_is_found_beyond_the_first_candidates_too(stock, best):
    asked = []

    def measure(sizes):
        asked.extend(sizes)
        return {size: abs(size - best) for size in sizes}

    assert stock.fastest_size(measure) == best
    assert len(set(asked)) == len(asked)
    assert min(asked) < best or best == stock.LEAST
    assert max(asked) > best or best == stock.GREATEST


def test_the_best_stock_step_is_the_one_whose_median_is_least(stock):
    assert stock.fastest({"ddp": [3.0, 1.0, 3.0], "ddp_tuned": [2.0, 2.0, 9.0], "ddp_small": [4.0, 4.0, 0.1]}) == (
        "ddp_tuned"
    )
    assert stock.BF16 not in stock.EXACT


def test_turns_begin_with_another_variant_in_each_round_and_a_twin_is_measured_as_itself(stock):
    class Ranks:
        def __init__(self):
            self.asked = []

        def do(self, *, job, name, count):
            self.asked.append(name)
            return [{"seconds": len(self.asked)}, {"seconds": 0.0}]

    ranks = Ranks()
    times = stock.turns(ranks, ["a", "b", "a (again)"], 2, 5)
    assert ranks.asked == ["a", "b", "a", "b", "a", "a"]
    assert times == {"a": [1, 6], "b": [2, 4], "a (again)": [3, 5]}


RANK = """
import sys

import torch
import torch.distributed as dist

sys.path.insert(0, sys.argv[3])
import data_parallel_worker as worker

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
found = worker.predict("waiting uniform", 0.001, 1000.0, 1 << 16, 1 << 20)
assert found["bytes"] == 48 * 64 * 1024 * 4
assert found["ddp"] > 0


def small(name, seconds):
    torch.manual_seed(0)
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(rank))
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 1)), lambda m: 100 * m(x).square().mean()


worker.make = small
weights = {}
for way, options in {
    "ddp": {}, "ddp_bf16": {"bucket_cap_mb": 1.0}, "ours": {"policy": "no_barrier"},
    "ours_bf16": {"policy": "no_barrier"},
}.items():
    variant = worker.Variant("small", 0.0, way, options)
    spent, loss = variant.steps(1)
    assert spent > 0
    with torch.no_grad():
        weights[way] = torch.cat([p.flatten() for p in variant.model.parameters()]).clone()
assert torch.equal(weights["ours"], weights["ddp"])
for way in ("ddp_bf16", "ours_bf16"):
    apart = float((weights[way] - weights["ddp"]).abs().max())
    assert 0 < apart < 1e-1, (way, apart)
print("ok", flush=True)
dist.barrier()
import os
os._exit(0)
"""


def test_ways_that_average_in_float32_give_the_same_weights_and_those_in_bfloat16_nearly(tmp_path, scripts):
    import data_parallel_stock

    run_ranks(RANK, tmp_path / "store", str(data_parallel_stock.Path(data_parallel_stock.__file__).parent))
