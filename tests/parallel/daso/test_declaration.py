"""Facts that must be the same on all ranks, and weights that must be."""

import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradweave.errors import GradweaveError
from gradweave.parallel.daso import DASO
from parallel.daso.training import (
    TIMEOUT,
    loss_of,
    make_model,
    make_optimizer,
    said_by,
    setting,
    weights_of,
)


def differing():
    """One rank, or one node, asks for something else; what each rank is told, and whether anything has changed."""
    rank, found = dist.get_rank(), {}
    common = {"mode": "delta", "every": 3, "wait": 1, "payload": "float32", "warm_up": 0, "on_failure": "raise"}
    others = {
        "mode": {"mode": "paper", "wait": None}, "payload": {"payload": "float16"}, "warm_up": {"warm_up": 2},
        "every": {"every": 4}, "wait": {"wait": 2}, "on_failure": {"on_failure": "continue"},
        "average_gradients": {"average_gradients": False}, "timeout=-1": {"timeout": -1},
    }  # fmt: skip
    for name, other in others.items():
        model = make_model()
        torch.manual_seed(rank)
        nn.init.normal_(model[0].weight)
        before, opt = weights_of(model), make_optimizer(model.parameters())
        options = {**common, "timeout": TIMEOUT, **(other if rank >= 2 else {})}
        said = said_by(lambda m=model, o=opt, given=options: DASO(m, o, **given))
        found[name] = said, torch.equal(before, weights_of(model))
    for name, kind, lr in (("lr", "sgd", 0.2), ("optimizer", "adamw", 0.1), ("LBFGS", "lbfgs", 0.1)):
        model = make_model()
        own = rank == 3
        opt = make_optimizer(model.parameters(), kind if own else "sgd", lr if own else 0.1)
        if kind == "lbfgs" and own:
            opt = torch.optim.LBFGS(model.parameters())
        found[name] = said_by(lambda m=model, o=opt: DASO(m, o, timeout=TIMEOUT)), True
    model = make_model()
    params = list(model.parameters())
    opt = make_optimizer(params if rank < 2 else params[::-1])
    found["order of parameters"] = said_by(lambda: DASO(model, opt, timeout=TIMEOUT)), True
    shape = (2, 2) if rank < 2 else (1, 4)
    mesh = mock.Mock(mesh_dim_names=("node", "local"), mesh=torch.arange(4).view(shape))
    model = make_model()
    said = said_by(lambda: DASO(model, make_optimizer(model.parameters()), mesh, timeout=TIMEOUT))
    found["mesh"] = said, True
    return found


def test_options_that_differ_between_ranks_are_refused_by_all(two_by_two):
    found = two_by_two.run(differing)
    ranks = [found[rank] for rank in range(4)]
    for name in ranks[0]:
        assert all(unchanged for _, unchanged in (each[name] for each in ranks)), name
        assert all(each[name][0] is not None for each in ranks), name
    for name in (
        "mode",
        "payload",
        "warm_up",
        "every",
        "wait",
        "on_failure",
        "average_gradients",
        "mesh",
        "order of parameters",
    ):
        assert len({each[name][0] for each in ranks}) == 1
        assert name in ranks[0][name][0]
        assert "give DASO the same on all ranks" in ranks[0][name][0]
    assert "lr of group 0" in ranks[0]["lr"][0]
    assert "is 0.2 on rank 3 and 0.1 on rank 0" in ranks[2]["lr"][0]
    assert "AdamW on rank 3" in ranks[1]["optimizer"][0]
    assert "DASO: rank 3 refuses, and so do all: LBFGS" in ranks[0]["LBFGS"][0]
    assert "takes several backwards" in ranks[3]["LBFGS"][0]
    assert "rank 2 refuses" in ranks[0]["timeout=-1"][0]
    assert "positive" in ranks[1]["timeout=-1"][0]


def closure(*, steps):
    """Optimizers that are given a closure, as Lightning does; and a copy of the model stays out of it."""
    model, opt = setting()
    daso = DASO(model, opt, timeout=TIMEOUT, every=2, wait=1)
    for step in range(steps):

        def run(step=step):
            opt.zero_grad()
            loss = loss_of(model, dist.get_rank(), step)
            loss.backward()
            return loss

        opt.step(run)
    copied = copy.deepcopy(model)
    loss_of(copied, dist.get_rank(), 0).backward()
    counted = daso.steps
    daso.finish()
    return weights_of(model), counted


class Noisy(torch.optim.SGD):
    """An optimizer with noise of its own on each rank."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        generator = torch.Generator().manual_seed(dist.get_rank())
        for p in self.param_groups[0]["params"]:
            p.add_(torch.randn(p.shape, generator=generator), alpha=1e-6)


def noisy(*, average_gradients):
    model = make_model()
    opt = Noisy(model.parameters(), lr=0.1)
    daso = DASO(model, opt, every=2, wait=1, timeout=TIMEOUT, average_gradients=average_gradients)
    said, number = None, 0
    try:
        for number in range(6):
            loss_of(model, dist.get_rank(), number).backward()
            if not average_gradients:
                for p in model.parameters():
                    p.grad.zero_()
            opt.step()
            opt.zero_grad()
    except GradweaveError as error:
        said = str(error)
    daso.detach()
    return said, number


@pytest.mark.parametrize("average_gradients", [True, False])
def test_an_optimizer_with_noise_of_its_own_is_found_in_the_first_steps(two_by_two, average_gradients):
    for said, number in two_by_two.run(noisy, average_gradients=average_gradients).values():
        assert said.startswith("DASO with Noisy: before update")
        assert "weights differ between ranks" in said
        assert "noise" in said
        assert number <= 2
