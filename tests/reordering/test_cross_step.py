"""Weight gradients that cross into the next forward: the stock training, bit for bit."""

import copy
import gc
from contextlib import nullcontext

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

from gradweave._runtime.deferred import deferred_updates, pending_updates
from gradweave._runtime.deferred.late import LateGradient
from gradweave._runtime.split_calls.task import Task
from gradweave.errors import ArgumentError, GradweaveError
from gradweave.fusion import fuse
from gradweave.reordering import cross_step, deferred_gradients
from gradweave.reordering.api import reorder
from gradweave.schedule.costs import Costs, LayerCost
from gradweave.schedule.tasks import Demand

WIDTH = 8


def net():
    torch.manual_seed(0)
    layers = [nn.Linear(4, WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(5))]
    return nn.Sequential(*(one for layer in layers for one in (layer, nn.Tanh())))


def conv_net():
    torch.manual_seed(0)
    convs = [nn.Conv2d(3, 6, 3), *(nn.Conv2d(6, 6, 3, padding=1, bias=i % 2 == 0) for i in range(4))]
    return nn.Sequential(*convs, nn.Flatten(), nn.Linear(6 * 16, 4)).to(memory_format=torch.channels_last)


def crossing_costs(model):
    """Costs by which the later layers' weight gradients pay only beside the next forward."""
    names = [name for name, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    idle, busy = Demand(0.1, 0.1), Demand(1.0, 1.0)
    return Costs(
        tuple(LayerCost(name, 2.0, 1.0, 1.0, 0.0, 1, 1, 1, "", idle, busy, Demand(0.9, 0.9), idle) for name in names)
    )


@pytest.fixture
def crossed(monkeypatch):
    """The number of tasks of each deferred gradient when it was computed."""
    seen = []
    real = deferred_gradients.DeferredLayerGradients.ready

    def ready(self):
        if not self._gradients:
            seen.append(len(self._tasks))
        return real(self)

    monkeypatch.setattr(deferred_gradients.DeferredLayerGradients, "ready", ready)
    return seen


def train(
    woven, *, make=net, steps=6, x=None, between=lambda model, optimizer: None, micro=1, autocast=False,
    sgd=False, **options,
):  # fmt: skip
    model = make()
    optimizer = optim.SGD(model.parameters(), lr=0.1) if sgd else optim.AdamW(model.parameters(), lr=1e-2)
    handle = fusion = None
    if woven:
        fusion = fuse(model, optimizer, "forward")
        handle = reorder(model, "cross_step", costs=crossing_costs(model), **options)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        for _ in range(micro):
            batch = torch.randn(*(x or (3, 4)), generator=generator)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                out = model(batch)
            loss = out.float().square().mean()
            loss.backward()
            losses.append(loss.detach())
        between(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    if fusion is not None:
        fusion.flush()
    return model, optimizer, torch.stack(losses), handle


def assert_same(one, other):
    (model, optimizer, losses, *_), (model2, optimizer2, losses2, *_) = one, other
    assert torch.equal(losses, losses2)
    for a, b in zip(model.parameters(), model2.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a.stride() == b.stride()
        for key, value in optimizer.state.get(a, {}).items():
            expected = optimizer2.state[b][key]
            assert torch.equal(value, expected) if isinstance(value, torch.Tensor) else value == expected


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("budget", [None, 0, 300, 600])
@pytest.mark.parametrize(("make", "x"), [(net, (3, 4)), (conv_net, (2, 3, 6, 6))])
def test_training_is_the_stock_training(make, x, budget, autocast, crossed):
    made = train(True, make=make, x=x, byte_budget=budget, autocast=autocast)
    assert_same(made, train(False, make=make, x=x, autocast=autocast))
    handle = made[3]
    assert budget is None or handle.most_bytes_held <= budget
    assert ("may cross" in handle.explain()) == (budget != 0)  # nothing is planned to wait where nothing may
    assert make is conv_net or budget in (0, 300) or len(crossed) > 0
    assert budget is not None or len(crossed) == handle._cross_step_deferral.crossed > 5
    assert handle._queue.held_bytes == 0


def test_a_weight_gradient_is_computed_in_the_next_forward():
    model = net()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    fuse(model, optimizer, "forward")
    handle = reorder(model, "cross_step", costs=crossing_costs(model))
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
    assert handle._queue.held_bytes > 0
    model[0].weight.sum()
    assert handle._queue.held_bytes > 0
    seen = []
    for layer in model[::2]:
        layer.register_forward_pre_hook(lambda *_: seen.append(handle._queue.held_bytes > 0))
    model(torch.randn(3, 4))
    first = min(handle._cross_step_deferral.layers)
    assert seen == [number <= first for number in range(6)]
    assert handle._queue.held_bytes == 0


def test_any_use_of_a_gradient_sees_it():
    def gradients(woven):
        seen = []

        def between(model, optimizer):
            if woven and len(seen) > 1:
                assert any(type(p.grad) is LateGradient for p in model.parameters())
            seen.append([p.grad.clone() for p in model.parameters()])

        train(woven, between=between)
        return seen

    for made, expected in zip(gradients(True), gradients(False), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(made, expected, strict=True))


def clip(model, _):
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def clip_by_value(model, _):
    nn.utils.clip_grad_value_(model.parameters(), 0.001)


def halve(model, _):
    for p in model.parameters():
        p.grad = p.grad / 2


def forget_some(model, _):
    model[2].weight.grad = None


def evaluate(model, _):
    with torch.no_grad():
        model(torch.zeros(1, 4))


@pytest.mark.parametrize("between", [clip, clip_by_value, halve, forget_some, evaluate])
def test_what_loops_do_between_backward_and_step(between):
    assert_same(train(True, between=between), train(False, between=between))


def test_gradients_that_are_late_in_some_steps_only():
    def between(model, optimizer):
        between.calls += 1
        if between.calls % 2:
            clip(model, optimizer)
            for p in model.parameters():
                p.grad = p.grad.clone()

    between.calls = 0
    made = train(True, between=between, steps=9)
    between.calls = 0
    assert_same(made, train(False, between=between, steps=9))


def test_a_weight_is_read_after_a_step_in_which_its_gradient_was_not_late():
    def run(woven):
        model = net()
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        if woven:
            fuse(model, optimizer, "forward")
            reorder(model, "cross_step", costs=crossing_costs(model))
        sums = []
        for number in range(6):
            model(torch.ones(2, 4)).sum().backward()
            if number % 2:
                for p in model.parameters():
                    p.grad = p.grad.clone()
            optimizer.step()
            optimizer.zero_grad()
            sums.append(model[10].weight.sum().item())
        return sums

    assert run(True) == run(False)


def test_accumulation():
    made = train(True, micro=3)
    assert_same(made, train(False, micro=3))
    assert made[3]._cross_step_deferral.crossed > 0


def test_gradient_scaling():
    def run(woven):
        model = net()
        optimizer = optim.AdamW(model.parameters(), lr=1e-2)
        if woven:
            fuse(model, optimizer, "forward")
            reorder(model, "cross_step", costs=crossing_costs(model))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for number in range(6):
            loss = model(torch.full((2, 4), 0.1 * number)).sum() * (float("inf") if number == 3 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return model

    made, expected = run(True), run(False)
    assert all(torch.equal(a, b) for a, b in zip(made.parameters(), expected.parameters(), strict=True))


def test_hooks_see_gradients_in_backward():
    seen = []

    def run(woven):
        model = net()
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        for layer in (model[4], model[6]):
            layer.weight.register_hook(lambda grad: seen.append(type(grad)) or grad * 2)
        if woven:
            fuse(model, optimizer, "forward")
            reorder(model, "cross_step", costs=crossing_costs(model))
        for _ in range(4):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model

    made, expected = run(True), run(False)
    assert all(torch.equal(a, b) for a, b in zip(made.parameters(), expected.parameters(), strict=True))
    assert set(seen) == {torch.Tensor}


def test_gradients_asked_for_without_backward():
    model = net()
    fuse(model, optim.SGD(model.parameters(), lr=0.1), "forward")
    expected = torch.autograd.grad(model(torch.ones(2, 4)).sum(), list(model.parameters()))
    reorder(model, "cross_step", costs=crossing_costs(model))
    made = torch.autograd.grad(model(torch.ones(2, 4)).sum(), list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(made, expected, strict=True))


def test_an_activation_that_is_overwritten_is_an_error():
    kept = []
    model = net()
    model[9].register_forward_hook(lambda _, __, out: kept.append(out.detach()))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    fuse(model, optimizer, "forward")
    reorder(model, "cross_step", costs=crossing_costs(model))
    for _ in range(2):
        kept.clear()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    kept[0].zero_()
    with pytest.raises(GradweaveError, match="changed in place before"):
        model(torch.ones(2, 4))


def test_a_batch_may_be_overwritten():
    """Layers that read the batch itself do not cross."""

    class ReadsTwice(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.one, self.two, self.three = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.three(torch.tanh(self.one(x)) + self.two(x))

    def run(woven):
        model = ReadsTwice()
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        if woven:
            fuse(model, optimizer, "forward")
            reorder(model, "cross_step", costs=crossing_costs(model))
        batch = torch.empty(3, 4)
        for number in range(5):
            batch.fill_(number)
            model(batch).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            batch.zero_()
        return [p.detach() for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run(True), run(False), strict=True))


@pytest.mark.parametrize("which", ["reorder", "fusion"])
def test_detaching_either_in_mid_training(which):
    def run(woven):
        model = net()
        optimizer = optim.AdamW(model.parameters(), lr=1e-2)
        if woven:
            fusion = fuse(model, optimizer, "forward")
            handle = reorder(model, "cross_step", costs=crossing_costs(model))
        for number in range(8):
            model(torch.full((2, 4), 0.1 * number)).sum().backward()
            if woven and number == 4:
                (handle if which == "reorder" else fusion).detach()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run(True), run(False), strict=True))


def test_checkpoints_and_copies_while_gradients_are_late():
    made = train(True, steps=3, between=lambda *_: None)
    model, optimizer, _, handle = made
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    twin = copy.deepcopy(model.state_dict())
    state = copy.deepcopy(optimizer.state_dict())
    expected, stock, *_ = train(False, steps=3)
    expected(torch.ones(2, 4)).sum().backward()
    stock.step()
    assert all(torch.equal(a, b) for a, b in zip(twin.values(), expected.state_dict().values(), strict=True))
    for key, value in stock.state_dict()["state"].items():
        assert all(torch.equal(value[name], state["state"][key][name]) for name in value)
    assert handle._queue.held_bytes == 0


def test_unwanted_gradients_leave_nothing_behind():
    model = net()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    fuse(model, optimizer, "forward")
    handle = reorder(model, "cross_step", costs=crossing_costs(model))
    before = [one for one in gc.get_objects() if type(one) is Task]
    for _ in range(4):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.zero_grad()
    assert handle._cross_step_deferral.crossed > 0
    with torch.no_grad():
        model(torch.ones(2, 4))
    gc.collect()
    assert handle._queue.held_bytes == 0
    assert not [one for one in gc.get_objects() if type(one) is Task and one not in before]


@pytest.mark.parametrize("mode", [None, "backward", "auto"])
def test_it_needs_forward_fusion(mode):
    model = net()
    if mode is not None:
        fuse(model, optim.SGD(model.parameters(), lr=0.1), mode)
    with pytest.raises(ArgumentError, match=r'policy=.cross_step.*call fuse\(model, optimizer, mode="forward"\)'):
        reorder(model, "cross_step", costs=crossing_costs(model))


def test_only_fused_layers_cross():
    model = net()
    fuse(model, optim.SGD(model[6:].parameters(), lr=0.1), "forward")
    handle = reorder(model, "cross_step", costs=crossing_costs(model))
    assert handle._cross_step_deferral.layers <= {3, 4, 5}
    assert handle._cross_step_deferral.layers


def test_tied_weights():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embedding, self.mix = nn.Embedding(11, 8), nn.Linear(8, 8)
            self.head = nn.Linear(8, 11, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, x):
            return self.head(torch.tanh(self.mix(torch.tanh(self.mix(self.embedding(x))))))

    def run(woven):
        model = Tied()
        optimizer = optim.AdamW(model.parameters(), lr=1e-2)
        if woven:
            fuse(model, optimizer, "forward")
            handle = reorder(model, "cross_step", costs=crossing_costs(model))
            handle._cross_step_deferral = handle._cross_step_deferral or cross_step.CrossStepDeferral(
                handle._queue, frozenset({0, 1})
            )
            handle._cross_step_deferral.layers = frozenset({0, 1})
        tokens = torch.arange(11).reshape(1, 11)
        for _ in range(5):
            F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run(True), run(False), strict=True))


@pytest.mark.parametrize("deferred", [False, True])
def test_gradients_cross_inside_a_graph_of_several_steps_only(deferred, monkeypatch):
    """As if a CUDA graph were being captured."""

    def run(woven):
        model = net()
        optimizer = optim.AdamW(model.parameters(), lr=1e-2)
        crossed = 0
        if woven:
            fusion = fuse(model, optimizer, "forward")
            handle = reorder(model, "cross_step", costs=crossing_costs(model))
        for number in range(4):
            if woven and number == 2:
                fusion.flush()
                crossed = handle._cross_step_deferral.crossed
                monkeypatch.setattr(cross_step, "_is_capturing", lambda: True)
                for module in (pending_updates, deferred_updates):
                    monkeypatch.setattr(module, "capturing", lambda: True)
            with fusion.in_graph() if woven and number == 2 and deferred else nullcontext():
                for _ in range(3):
                    model(torch.full((2, 4), 0.1 * number)).square().sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            if woven and number == 2:
                crossed = handle._cross_step_deferral.crossed - crossed
                assert handle._queue.held_bytes == 0
                monkeypatch.undo()
        return crossed, [p.detach().clone() for p in model.parameters()]

    crossed, made = run(True)
    assert (crossed > 0) == deferred
    assert all(torch.equal(a, b) for a, b in zip(made, run(False)[1], strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("budget", [None, 100_000])
@pytest.mark.parametrize("autocast", [False, True])
def test_on_a_gpu_updates_wait_for_gradients_on_another_stream(budget, autocast):
    def run(woven):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(12))).cuda()
        optimizer = optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        handle = None
        if woven:
            fuse(model, optimizer, "forward")
            handle = reorder(model, "cross_step", costs=crossing_costs(model), byte_budget=budget)
        x = torch.randn(256, 512, device="cuda")
        for _ in range(30):
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert handle is None or budget is not None or handle._cross_step_deferral.crossed > 30
        return [p.detach().clone() for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run(True), run(False), strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_captured_steps_join_all_of_their_gradients(steps):
    def run(woven):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))).cuda()
        optimizer = optim.AdamW(model.parameters(), lr=1e-3, fused=True, capturable=True)
        fusion = fuse(model, optimizer, "forward") if woven else None
        if woven:
            reorder(model, "cross_step", costs=crossing_costs(model))
        x = torch.randn(32, 64, device="cuda")

        def step():
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
            if fusion is not None:
                fusion.flush()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), fusion.in_graph() if fusion is not None and steps > 1 else nullcontext():
            for _ in range(steps):
                step()
        for _ in range(10):
            graph.replay()
        torch.cuda.synchronize()
        return [p.detach().clone() for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run(True), run(False), strict=True))
