"""What can be seen of it without a GPU: calls done again, pairs, shares; with one, that costs get shares."""

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

import gradweave
from gradweave.profile import measure_costs
from gradweave.profile.measure import capturable_update
from gradweave.profile.overlap import UPDATE, Calls, feasible_pairs, scale, share_out
from gradweave.schedule.costs import Costs
from gradweave.schedule.tasks import Kind


def test_kept_calls_give_the_same_results_again():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    step = gradweave.compile(
        model, lambda m, x: m(x).square().sum(), optim.SGD(model.parameters(), lr=0.1), lower="replay"
    )
    batch = torch.randn(3, 4)
    step(batch)
    calls = Calls()
    results = {}

    class Noting(Calls):
        def run(self, kind, layers):
            for layer in layers:
                results[kind, layer] = [function(*args, **kwargs) for function, args, kwargs in self.of[kind, layer]]

    calls = Noting()
    before = [p.detach().clone() for p in model.parameters()]
    step.record(calls.task)
    step(batch)
    step.record(None)
    assert {kind for kind, _ in calls.of} == {Kind.F, Kind.X, Kind.W}
    calls.run(Kind.F, range(2))
    calls.run(Kind.W, range(2))
    weight = [r for r in results[Kind.W, 1] if isinstance(r, torch.Tensor) and r.numel() == 12]
    stock = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    with torch.no_grad():
        for p, q in zip(stock.parameters(), before, strict=True):
            p.copy_(q)
    stock(batch).square().sum().backward()
    assert any(torch.allclose(r.reshape(2, 6), stock[2].weight.grad) for r in weight)


def test_pairs_are_those_that_a_schedule_may_choose():
    parts = [(kind, group) for group in range(3) for kind in (Kind.F, Kind.X, Kind.W)]
    pairs = feasible_pairs(parts)
    assert ((Kind.W, 2), (Kind.X, 0)) in pairs
    assert ((Kind.W, 0), (Kind.X, 0)) in pairs
    assert ((Kind.W, 0), (Kind.X, 1)) not in pairs
    assert ((Kind.W, 1), (Kind.F, 0)) in pairs
    assert ((Kind.W, 1), (Kind.F, 1)) not in pairs
    assert len(pairs) == 6 + 3
    assert len(feasible_pairs([*parts, UPDATE])) == 6 + 3 + 6


@pytest.mark.parametrize(
    ("make", "form", "can"),
    [
        (optim.AdamW, {"fused": True}, True), (optim.AdamW, {"foreach": True}, False), (optim.AdamW, {}, False),
        (optim.SGD, {}, True), (optim.RMSprop, {}, False),
    ],
)  # fmt: skip
def test_updates_that_a_graph_can_hold(make, form, can):
    model = nn.Linear(2, 2)
    update = capturable_update(make(model.parameters(), lr=0.1, **form))
    assert (update is not None) == can


def test_layers_get_the_shares_of_their_group(tmp_path):
    groups = [range(2), range(2, 4)]
    parts = [(kind, group) for group in range(2) for kind in (Kind.F, Kind.X, Kind.W)]
    slowdowns = {(one, other): 1.2 if other[0] is Kind.X else 2.0 for one, other in feasible_pairs(parts)}
    costs = share_out(Costs.uniform(4), groups, slowdowns)
    with_update = share_out(Costs.uniform(4), groups, {(UPDATE, part): 1.1 for part in parts if part[0] is Kind.F})
    assert with_update.layers[0].update_demand.compute + with_update.layers[0].forward_demand.compute < 1.2
    assert [layer.block for layer in costs.layers] == ["group 0", "group 0", "group 1", "group 1"]
    first, last = costs.layers[0], costs.layers[3]
    assert last.weight_grad_demand.compute + first.input_grad_demand.compute < 1.9
    assert last.update_demand.compute == 1.0
    costs.save(tmp_path / "costs.json")
    assert Costs.load(tmp_path / "costs.json") == costs
    graph = gradweave.schedule.single(costs)
    times = {name: gradweave.plan(graph, policy=name).simulate().step_time for name in ("in_order", "joint")}
    assert times["joint"] < times["in_order"]


def test_costs_sum_up_to_what_groups_take():
    groups = [range(2), range(2, 4)]
    costs = scale(Costs.uniform(4), groups, {(Kind.F, 0): 5.0, (Kind.W, 1): 1.0, UPDATE: 8.0})
    assert [layer.forward for layer in costs.layers] == [2.5, 2.5, 1.0, 1.0]
    assert [layer.weight_grad for layer in costs.layers] == [1.0, 1.0, 0.5, 0.5]
    assert [layer.update for layer in costs.layers] == [0.0] * 4
    assert [layer.input_grad for layer in costs.layers] == [1.0] * 4


def test_a_cpu_gives_a_task_the_whole_device():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    costs = measure_costs(
        model, lambda m, x: m(x).sum(), optim.SGD(model.parameters(), lr=0.1), (torch.ones(2, 4),), rounds=1
    )
    assert all(layer.weight_grad_demand.compute == layer.input_grad_demand.memory == 1.0 for layer in costs.layers)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_small_layers_leave_room_on_a_gpu():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(12))).cuda()
    x = torch.randn(64, 256, device="cuda")
    told = []
    costs = measure_costs(
        model, lambda m, x: F.mse_loss(m(x), x), optim.SGD(model.parameters(), lr=0.1), (x,),
        progress=lambda *what: told.append(what),
    )  # fmt: skip
    assert told[-1][1] == 1.0
    assert any(layer.weight_grad_demand.compute < 1.0 for layer in costs.layers)
    graph = gradweave.schedule.single(costs)
    times = {name: gradweave.plan(graph, policy=name).simulate().step_time for name in ("in_order", "joint")}
    assert times["joint"] < times["in_order"]
