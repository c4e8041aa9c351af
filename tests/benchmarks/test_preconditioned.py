"""Shampoo, SOAP and Muon that Eva is measured against: many steps against their formulas, and fit for a CUDA graph."""

import pytest
import torch
from muon import Muon
from shampoo import Shampoo
from soap import SOAP
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from reference import preconditioned as slow

STEPS = 25
SHAPE = (5, 4)
SHAMPOO = {
    "lr": 0.03, "betas": (0.8, 0.9), "shampoo_beta": 0.85, "eps": 1e-8, "root_eps": 1e-6, "weight_decay": 0.1,
    "refresh": 4,
}  # fmt: skip
SOAP_OPTIONS = {"lr": 0.03, "betas": (0.8, 0.85), "eps": 1e-8, "weight_decay": 0.1, "refresh": 4}


def gradients(shape=SHAPE, dtype=torch.float64):
    """Gradients whose directions drift, so that averages over other spans differ."""
    generator = torch.Generator().manual_seed(0)
    drift = torch.randn(3, *shape, generator=generator, dtype=dtype)
    noise = torch.randn(STEPS, *shape, generator=generator, dtype=dtype)
    return [drift[0] + drift[1] * (at / 5) + 0.5 * noise[at] for at in range(STEPS)]


def start(shape=SHAPE, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=dtype)


def run(make, history, p=None):
    p = nn.Parameter(start(history[0].shape, history[0].dtype) if p is None else p)
    optimizer = make([p])
    for g in history:
        p.grad = g.clone()
        optimizer.step()
        optimizer.between_steps()
    return p.detach()


def test_shampoo_takes_its_formulas_steps_of_adams_length():
    expected = slow.shampoo(start(), gradients(), **SHAMPOO)
    torch.testing.assert_close(run(lambda ps: Shampoo(ps, **SHAMPOO), gradients()), expected, rtol=1e-7, atol=1e-9)


def test_shampoo_leaves_large_sides_alone_and_takes_the_root_of_the_other():
    expected = slow.shampoo(start(), gradients(), **SHAMPOO, sides=(1,))
    made = run(lambda ps: Shampoo(ps, **SHAMPOO, largest=4), gradients())
    torch.testing.assert_close(made, expected, rtol=1e-7, atol=1e-9)


def test_soap_takes_its_formulas_steps():
    expected = slow.soap(start(), gradients(), **SOAP_OPTIONS)
    torch.testing.assert_close(run(lambda ps: SOAP(ps, **SOAP_OPTIONS), gradients()), expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (3, 2, 2, 1)])
def test_muon_is_that_of_torch(shape):
    history = gradients(shape, torch.float32)
    ours = run(lambda ps: Muon(ps, lr=0.05, momentum=0.9, weight_decay=0.1), history)
    p = nn.Parameter(start(shape, torch.float32).flatten(1))
    stock = torch.optim.Muon([p], lr=0.05, momentum=0.9, weight_decay=0.1)
    for g in history:
        p.grad = g.flatten(1).clone()
        stock.step()
    torch.testing.assert_close(ours.flatten(1), p.detach(), rtol=0, atol=2e-3)  # of bfloat16, over a way of about one


@pytest.mark.parametrize("cls", [Shampoo, SOAP])
def test_vectors_take_adams_steps(cls):
    history = gradients((4,))
    ours = run(lambda ps: cls(ps, lr=0.03, betas=(0.8, 0.9), weight_decay=0.1), history)
    p = nn.Parameter(start((4,)))
    stock = torch.optim.AdamW([p], lr=0.03, betas=(0.8, 0.9), weight_decay=0.1)
    for g in history if cls is Shampoo else history[1:]:
        p.grad = g.clone()
        stock.step()
    torch.testing.assert_close(ours, p.detach())


class NothingIsRead(TorchDispatchMode):
    """Refuses what a CUDA graph cannot hold: reading a number on the host, or copying a tensor there."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("cls", [Shampoo, SOAP, Muon])
def test_a_step_reads_nothing_on_the_host_and_keeps_its_state_where_it_is(cls):
    """As a graph replays it: with a learning rate in a tensor, between whose steps only contents of memory change."""
    p, lr = nn.Parameter(start()), torch.tensor(0.01)
    optimizer = cls([p], lr=lr)
    places = []
    for g in gradients()[:12]:
        p.grad = g.clone()
        if places:
            with NothingIsRead():
                optimizer.step()
        else:
            optimizer.step()
        optimizer.between_steps()
        state = optimizer.state[p].items()
        places.append({key: one.data_ptr() for key, one in state if isinstance(one, torch.Tensor)})
    assert all(one == places[0] for one in places)
    lr.fill_(0.0)
    before = p.detach().clone()
    optimizer.step()
    assert torch.equal(before, p)
