"""Without a GPU: pairs, and shares fitted to slowdowns; with one: costs get shares."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn, optim
from torch.nn import functional as F

import gradweave
from gradweave.profile import measure_costs
from gradweave.profile.overlap import (
    UPDATE,
    equal_groups,
    feasible_pairs,
    fit_shares,
    scale_parts,
    slowdown,
    with_shares,
)
from gradweave.schedule.costs import Costs
from gradweave.schedule.tasks import Kind

SHARES = st.integers(0, 50).map(lambda number: number / 50)


@pytest.mark.parametrize(
    ("one", "other", "together", "factor"),
    [(1, 1, 2, 2.0), (1, 1, 1, 1.0), (1, 3, 3, 1.0), (3, 1, 4, 2.0), (1, 1, 1.5, 1.5), (1, 1, 5, 2.0), (0, 1, 1, 2.0)],
)
def test_slowdown(one, other, together, factor):
    assert slowdown(one, other, together) == pytest.approx(factor)


@given(st.lists(SHARES, min_size=1, max_size=4), st.lists(SHARES, min_size=1, max_size=4))
def test_fitted_shares_give_the_slowdowns_back(weight_gradients, others):
    measured = {
        (("W", i), ("X", j)): max(1.0, a + b) for i, a in enumerate(weight_gradients) for j, b in enumerate(others)
    }
    shares = fit_shares(measured)
    for (one, other), factor in measured.items():
        assert max(1.0, shares[one] + shares[other]) == pytest.approx(factor, abs=0.021)  # shares are multiples of 0.02


def test_nothing_is_promised_that_was_not_seen():
    assert fit_shares({("W", "X"): 2.0}) == {"W": 1.0, "X": 1.0}
    fitted = fit_shares({("W", "X"): 1.0})
    assert fitted["W"] + fitted["X"] == pytest.approx(1.0)
    assert fit_shares({}) == {}


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.integers(1, 9))
def test_groups_hold_every_layer_once_in_order(seconds, most):
    groups = equal_groups(seconds, most)
    assert [i for group in groups for i in group] == list(range(len(seconds)))
    assert all(len(group) > 0 for group in groups)


def test_groups_take_about_as_long_as_each_other():
    assert equal_groups([1.0] * 12, 4) == [range(3), range(3, 6), range(6, 9), range(9, 12)]
    assert equal_groups([8.0, 1.0, 1.0], 2) == [range(1), range(1, 3)]


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


def test_layers_get_the_shares_of_their_group(tmp_path):
    groups = [range(2), range(2, 4)]
    parts = [(kind, group) for group in range(2) for kind in (Kind.F, Kind.X, Kind.W)]
    slowdowns = {(one, other): 1.2 if other[0] is Kind.X else 2.0 for one, other in feasible_pairs(parts)}
    costs = with_shares(Costs.uniform(4), groups, slowdowns)
    with_update = with_shares(Costs.uniform(4), groups, {(UPDATE, part): 1.1 for part in parts if part[0] is Kind.F})
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
    costs = scale_parts(Costs.uniform(4), groups, {(Kind.F, 0): 5.0, (Kind.W, 1): 1.0, UPDATE: 8.0})
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
