from graphlib import TopologicalSorter

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
from hypothesis import given
from hypothesis import strategies as st
from torch import nn, optim
from torch.nn import functional as F

import gradweave
from gradweave.compiler import kernel_combining as combining
from gradweave.compiler import lower
from gradweave.compiler.kernel_combining import AT_MOST, groups_to_combine

graphs = st.integers(1, 40).flatmap(
    lambda count: st.tuples(
        st.permutations(range(count)),
        st.lists(st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)), max_size=3 * count),
        st.lists(st.sampled_from([None, "one", "other"]), min_size=count, max_size=count),
    )
)


@given(graphs)
def test_groups_do_not_depend_on_themselves_and_can_be_ordered(graph):
    order, pairs, kinds = graph
    needs = {node: [] for node in order}
    for one, other in pairs:
        if one < other:
            needs[other].append(one)
    groups = groups_to_combine(order, needs.__getitem__, kinds.__getitem__)
    grouped = [node for group in groups for node in group]
    assert sorted(grouped) == [node for node in range(len(order)) if kinds[node] is not None]
    assert all(len(group) <= AT_MOST and len({kinds[node] for node in group}) == 1 for group in groups)
    place = {node: node for node in order} | {n: ("group", i) for i, group in enumerate(groups) for n in group}
    combined = {place[node]: set() for node in order}
    for node, needed in needs.items():
        assert not {place[node]} & {place[n] for n in needed}
        combined[place[node]] |= {place[n] for n in needed}
    list(TopologicalSorter(combined).static_order())


def test_updates_of_all_layers_are_equally_far_from_the_end():
    needs = {"forward": [], "backward 2": ["forward"], "backward 1": ["backward 2"]}
    needs |= {"update 2": ["backward 2"], "update 1": ["backward 1"], "loss": ["forward"]}
    groups = groups_to_combine(list(needs), needs.__getitem__, lambda node: "small" if "update" in node else None)
    assert sorted(map(sorted, groups)) == [["update 1", "update 2"]]


def test_casts_of_all_layers_depend_on_nothing():
    needs = {"cast 1": [], "cast 2": [], "forward 1": ["cast 1"], "forward 2": ["cast 2", "forward 1"]}
    groups = groups_to_combine(list(needs), needs.__getitem__, lambda node: "small" if "cast" in node else None)
    assert sorted(map(sorted, groups)) == [["cast 1", "cast 2"]]


@pytest.fixture
def no_caches():
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield


def train(steps=4):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    step = gradweave.compile(model, lambda m, x, y: F.mse_loss(m(x), y), optim.AdamW(model.parameters(), lr=0.1))
    return torch.stack([step(torch.ones(3, 8) * number, torch.ones(3, 4)) for number in range(steps)])


def test_a_failure_to_combine_is_a_step_without(monkeypatch, no_caches):
    expected = train()
    asked = []

    def fail(scheduler):
        asked.append(scheduler)
        raise AssertionError("a buffer was removed")

    monkeypatch.setattr(lower, "small_kernels", fail)
    assert torch.equal(train(), expected)
    assert asked


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
def test_small_updates_are_combined_on_a_gpu(monkeypatch, no_caches):
    found = []
    groups = combining.small_kernels
    monkeypatch.setattr(lower, "small_kernels", lambda scheduler: found.append(groups(scheduler)) or found[-1])
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6))).cuda()
    before = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6))).cuda()
    before.load_state_dict(model.state_dict())
    x = torch.randn(4, 16, device="cuda")
    step = gradweave.compile(model, lambda m, x: m(x).square().mean(), optim.AdamW(model.parameters(), lr=1e-2))
    stock = optim.AdamW(before.parameters(), lr=1e-2)
    for _ in range(6):
        made = step(x)
        expected = before(x).square().mean()
        expected.backward()
        stock.step()
        stock.zero_grad()
        torch.testing.assert_close(made, expected.detach(), rtol=1e-4, atol=1e-7)
    assert any(len(group) >= 6 for group in found[-1])
