"""Compiled steps; most of what they do is tested in test_step.py."""

import torch
from torch._dynamo.utils import counters

import gradweave


def test_what_was_compiled_is_found_on_disk():
    def train():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 24), torch.nn.Tanh(), torch.nn.Linear(24, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        step = gradweave.compile(model, lambda m, x: m(x).square().mean(), optimizer, max_grad_norm=1.0)
        return torch.stack([step(torch.ones(4, 8) * number) for number in range(5)])

    first = train()
    counters["inductor"].clear()
    counters["aot_autograd"].clear()
    second = train()
    assert torch.equal(first, second)
    assert counters["aot_autograd"]["autograd_cache_hit"] == 2
    assert not counters["inductor"]["fxgraph_cache_bypass"]
