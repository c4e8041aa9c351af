"""Attaching leaves nothing behind where it fails, nor where it is undone; ranks that differ are refused on all."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from gradweave.errors import UnsupportedError
from gradweave.parallel.data_parallel import DataParallel
from parallel.daso.worlds import World


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    world = World(tmp_path_factory.mktemp("ranks"), 2, 1, scenarios="parallel.data_parallel.attaching")
    yield world
    world.close()


@pytest.mark.parametrize("policy", ["in_order", "no_barrier", "reverse_first_k", "auto"])
def test_detach_ends_what_it_had_open(ranks, policy):
    for counts in ranks.run("uses", policy=policy).values():
        assert counts[-1] == counts[1]


@pytest.mark.parametrize(("own_groups", "least"), [(True, 3), (False, 20)])
def test_an_attach_that_fails_at_any_step_leaves_nothing_behind(ranks, own_groups, least):
    for answer in ranks.run("fails_at_every_step", own_groups=own_groups).values():
        assert answer["tried"] >= least
        assert answer["left"] == []
        assert answer["same"]


@pytest.mark.parametrize(
    ("what", "on_first", "on_second"),
    [
        ("learning rate", "lr of group 0: is 0.2", "on rank 1 and 0.1 on rank 0; give DataParallel"),
        ("class", "torch.optim.sgd.SGD", "torch.optim.adamw.AdamW"),
        ("groups", "the number of parameters in group 0: is 9 on rank 1 and 10 on rank 0", "is 9 on rank 1"),
        ("frozen", "frozen on rank 1 and of shape", "frozen on rank 1 and of shape"),
        ("one refuses", "rank 1 refuses, and so do all: LBFGS", "LBFGS: it cannot be updated in parts"),
        ("an option that one refuses", "rank 1 refuses, and so do all: policy='fast'", "policy='fast': use one of"),
    ],
)
def test_what_differs_between_ranks_is_refused_on_all(ranks, what, on_first, on_second):
    for said, answer in zip((on_first, on_second), ranks.run("refuses", what=what).values(), strict=True):
        assert said in answer[0]
        assert answer[1:] == ("1 groups", True)


class Coupled(torch.optim.SGD):
    """Divides all gradients by their common norm."""

    def step(self, closure=None):
        norm = torch.stack([p.grad.norm() for g in self.param_groups for p in g["params"] if p.grad is not None]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad / norm, alpha=-group["lr"])


def test_what_is_refused_names_what_to_use_instead():
    model = nn.Linear(3, 3)
    with pytest.raises(UnsupportedError, match="; use DistributedDataParallel") as caught:
        DataParallel(model, Coupled(model.parameters(), lr=0.1))
    assert "fuse" not in str(caught.value)


ENDS_WITHOUT_A_WORD = """
import sys, torch, torch.distributed as dist
from torch import nn
from gradweave.parallel.data_parallel import DataParallel
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=int(sys.argv[1]), world_size=2)
model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
trained = DataParallel(model, optimizer, policy="no_barrier")
for _ in range(3):
    trained(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
if sys.argv[3] == "destroyed":
    dist.destroy_process_group()
    trained.detach()
"""


@pytest.mark.parametrize("end", ["as it is", "destroyed"])
def test_a_program_that_ends_without_detach_ends_well(tmp_path, end):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", ENDS_WITHOUT_A_WORD, str(rank), str(tmp_path / "store"), end], stderr=subprocess.PIPE
        )
        for rank in range(2)
    ]
    try:
        errors = [rank.communicate(timeout=250)[1].decode() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    assert not any("terminate called" in error for error in errors)
