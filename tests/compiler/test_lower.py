"""Compiled steps; most of what they do is tested in test_api.py."""

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


class Buffers(torch.nn.Module):
    def __init__(self, shared, factor):
        super().__init__()
        self.layer = torch.nn.Linear(6, 4)
        self.factor = factor
        whole = torch.ones(6)
        self.register_buffer("whole", whole)
        self.register_buffer("part", whole[:4] if shared else torch.ones(4))

    def forward(self, x):
        self.whole.mul_(1.1)
        return self.layer(x) * self.part * torch.tensor([self.factor, 1.0, 2.0, 3.0])


def test_what_is_found_on_disk_is_for_the_same_constants_and_the_same_sharing_of_memory():
    def train(shared, factor, lower):
        torch.manual_seed(0)
        model = Buffers(shared, factor)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = gradweave.compile(model, lambda m, x: m(x).square().mean(), optimizer, lower=lower)
        return torch.stack([step(torch.ones(8, 6)) for _ in range(4)])

    for shared, factor in ((False, 1.0), (True, 1.0), (False, 5.0)):
        torch.testing.assert_close(
            train(shared, factor, "inductor"), train(shared, factor, "replay"), rtol=1e-4, atol=0
        )
