import torch
from torch import nn, optim

import gradweave
from gradweave.profile.captured import TaskCalls
from gradweave.schedule.tasks import Kind


def test_kept_calls_give_the_same_results_again():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    step = gradweave.compile(
        model, lambda m, x: m(x).square().sum(), optim.SGD(model.parameters(), lr=0.1), lower="replay"
    )
    batch = torch.randn(3, 4)
    step(batch)
    results = {}

    class Noting(TaskCalls):
        def run(self, kind, layers):
            for layer in layers:
                results[kind, layer] = [
                    function(*args, **kwargs) for function, args, kwargs in self.by_task[kind, layer]
                ]

    calls = Noting()
    before = [p.detach().clone() for p in model.parameters()]
    step.record(calls.keep)
    step(batch)
    step.record(None)
    assert {kind for kind, _ in calls.by_task} == {Kind.F, Kind.X, Kind.W}
    calls.run(Kind.F, range(2))
    calls.run(Kind.W, range(2))
    weight = [r for r in results[Kind.W, 1] if isinstance(r, torch.Tensor) and r.numel() == 12]
    stock = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    with torch.no_grad():
        for p, q in zip(stock.parameters(), before, strict=True):
            p.copy_(q)
    stock(batch).square().sum().backward()
    assert any(torch.allclose(r.reshape(2, 6), stock[2].weight.grad) for r in weight)
