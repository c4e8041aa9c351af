"""Backward-fusion after weight gradients that are still being computed: the stock training, bit for bit."""

import weakref
from contextlib import contextmanager

import pytest
import torch
from torch import nn, optim
from torch.fx.experimental.proxy_tensor import make_fx

from gradweave._runtime import buckets
from gradweave._runtime.deferred.late import LateGradient
from gradweave._runtime.split_calls import operations as split_ops
from gradweave.fusion import fuse
from gradweave.reordering.api import reorder
from gradweave.reordering.with_fusion import FusedUpdateDeferral
from reordering.test_cross_step import conv_net, crossing_costs, net

DEVICES = ["cpu", pytest.param("cuda", marks=[
    pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
])]  # fmt: skip
each_device = pytest.mark.parametrize("device", DEVICES)


def tied_net():
    torch.manual_seed(0)
    shared = nn.Linear(8, 8)
    return nn.Sequential(nn.Linear(4, 8), shared, nn.Tanh(), nn.LayerNorm(8), shared, nn.Linear(8, 2))


def attach(model, optimizer, policy):
    fusion = fuse(model, optimizer, "backward")
    costs = crossing_costs(model) if policy == "joint" else None
    return fusion, reorder(model, policy, costs=costs)


def at_work(policy, device="cpu"):
    """A training in which updates follow already."""
    model = net().to(device)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    fusion, _ = attach(model, optimizer, policy)
    x = torch.ones(3, 4, device=device)
    for _ in range(2):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, fusion, x


def train(policy, *, make=net, device="cpu", steps=5, size=(3, 4), autocast=False, loop=None, sgd=False):
    model = make().to(device)
    options = {"fused": True} if device == "cuda" else {}
    kind = optim.SGD if sgd else optim.AdamW
    optimizer = kind(model.parameters(), lr=1e-2, **options)
    fusion = handle = None
    if policy is not None:
        fusion, handle = attach(model, optimizer, policy)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for number in range(steps):
        batch = torch.randn(*size, generator=generator).to(device)
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            out = model(batch)
        loss = out.float().square().mean()
        loss.backward()
        if loop is not None:
            loop(number, model, optimizer, fusion, handle)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return model, optimizer, torch.stack(losses), handle


def check_same(one, other):
    for a, b in zip(one[0].parameters(), other[0].parameters(), strict=True):
        assert torch.equal(a, b)
        for key, value in one[1].state[a].items():
            assert torch.equal(value, other[1].state[b][key]), key
    assert torch.equal(one[2], other[2])


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch):
    monkeypatch.setattr(buckets, "CUDA_BUCKET_BYTES", 1)
    monkeypatch.setattr(buckets, "CPU_BUCKET_BYTES", {"forward": 1, "backward": 1})


@pytest.fixture
def late(monkeypatch):
    """Layers whose gradients were deferred."""
    taken = []
    real = FusedUpdateDeferral.defer

    def defer(self, layer, *given):
        made = real(self, layer, *given)
        if made is not None:
            taken.append(layer)
        return made

    monkeypatch.setattr(FusedUpdateDeferral, "defer", defer)
    return taken


@each_device
@pytest.mark.parametrize("policy", ["side_stream", "joint"])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("make", "size"), [(net, (3, 4)), (conv_net, (2, 3, 6, 6)), (tied_net, (3, 4))])
def test_it_trains_as_in_stock_order(device, policy, autocast, make, size, late):
    made = train(policy, make=make, device=device, size=size, autocast=autocast)
    check_same(made, train(None, make=make, device=device, size=size, autocast=autocast))
    assert late
    assert "follow" in made[3].explain()


def test_an_update_comes_right_after_its_gradients():
    events = []

    @contextmanager
    def note(what, number):
        events.append((what, number))
        yield

    def loop(number, model, optimizer, fusion, handle):
        handle.record(lambda layer: note("W", layer))
        fusion.record(lambda bucket: note("U", bucket))
        if number == 3:
            del events[:]

    train("side_stream", loop=loop)
    kinds = [what for what, _ in events]
    assert kinds.count("W") == 6
    assert "U" in kinds[: kinds.index("W") + 3]
    assert len({number for what, number in events if what == "U"}) > 1


@each_device
def test_gradients_are_freed_in_backward(device, late, monkeypatch):
    alive = []
    made = weakref.WeakSet()
    real = FusedUpdateDeferral.defer

    def defer(self, layer, *given):
        alive.append(sum(len(layer._gradients) for layer in made))
        taken = real(self, layer, *given)
        made.update(self._pending)
        return taken

    monkeypatch.setattr(FusedUpdateDeferral, "defer", defer)
    train("side_stream", device=device)
    assert max(alive) <= 4


@each_device
def test_what_no_update_takes_is_there_when_backward_returns(device, late):
    """A parameter that gets no gradient keeps its bucket from being updated in backward."""

    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return self.two(x) if self.calls % 3 == 0 else self.two(self.one(x))

    seen = []

    def loop(number, model, optimizer, fusion, handle):
        seen.extend(type(p.grad) for p in model.parameters())

    made = train("side_stream", make=Sometimes, device=device, steps=7, loop=loop)
    check_same(made, train(None, make=Sometimes, device=device, steps=7))
    assert LateGradient not in seen


@pytest.mark.parametrize("when", ["accumulated", "hooked"])
def test_gradients_that_something_else_needs_are_waited_for(when, late):
    def loop(number, model, optimizer, fusion, handle):
        if number == 1 and when == "hooked":
            for p in model.parameters():
                p.register_post_accumulate_grad_hook(lambda p: seen.append(type(p.grad)))
        if number == 1:
            del late[:]

    seen = []

    def more(number, model, optimizer, fusion, handle):
        loop(number, model, optimizer, fusion, handle)
        if number == 1 and when == "accumulated":
            optimizer.step()
            optimizer.zero_grad()
            if fusion is not None:
                with fusion.no_update():
                    model(torch.ones(3, 4)).square().mean().backward()
            else:
                model(torch.ones(3, 4)).square().mean().backward()
            assert not late
            optimizer.zero_grad()
            model(torch.ones(3, 4)).square().mean().backward()

    made = train("side_stream", loop=more, steps=4)
    first = len(late)
    check_same(made, train(None, loop=more, steps=4))
    assert (first == 0) == (when == "hooked")
    assert LateGradient not in seen


def test_either_may_be_detached_first():
    def let_go(which):
        def loop(number, model, optimizer, fusion, handle):
            if number == 2 and fusion is not None:
                optimizer.step()
                optimizer.zero_grad()
                (fusion if which == "fusion" else handle).detach()
                model(torch.ones(3, 4)).square().mean().backward()
            elif number == 2:
                optimizer.step()
                optimizer.zero_grad()
                model(torch.ones(3, 4)).square().mean().backward()

        return loop

    for which in ("fusion", "handle"):
        check_same(train("side_stream", loop=let_go(which)), train(None, loop=let_go(which)))


@each_device
def test_a_backward_that_fails(device):
    """What it has updated stays; the next forward finds nothing left over."""
    model, optimizer, fusion, x = at_work("side_stream", device)

    def fail(_):
        raise ValueError("no")

    middle = model[4].register_full_backward_pre_hook(lambda *_: fail(0))
    with pytest.raises(ValueError, match="no"):
        model(x).square().mean().backward()
    middle.remove()
    fusion.accept_partial()
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    assert torch.isfinite(loss)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_in_a_cuda_graph():
    expected = train(None, device="cuda", steps=6, sgd=True)
    model = net().cuda()
    optimizer = optim.SGD(model.parameters(), lr=1e-2, fused=True)
    attach(model, optimizer, "side_stream")
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(3, 4, generator=generator).cuda() for _ in range(6)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())

    def step(x):
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    with torch.cuda.stream(side):
        losses = [step(x) for x in batches[:3]]
    torch.cuda.current_stream().wait_stream(side)
    graph, x = torch.cuda.CUDAGraph(), batches[0].clone()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        loss = step(x)
    for batch in batches[3:]:
        x.copy_(batch)
        graph.replay()
        losses.append(loss.clone())
    assert torch.equal(torch.stack(losses), expected[2])
    for a, b in zip(model.parameters(), expected[0].parameters(), strict=True):
        assert torch.equal(a, b)


class Shared(nn.Module):
    """Layers of one weight, whose biases are others, or none."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.enter = nn.Linear(4, 8)
        self.one, self.two = nn.Linear(8, 8, bias=kind != "first without"), nn.Linear(8, 8)
        if kind != "functional":
            self.two.weight = self.one.weight

    def forward(self, x):
        x = torch.tanh(self.one(torch.tanh(self.enter(x))))
        x = nn.functional.linear(x, self.one.weight) if self.kind == "functional" else x
        return self.two(torch.tanh(x))


@each_device
@pytest.mark.parametrize("kind", ["first without", "both", "functional"])
def test_a_weight_that_is_shared_but_not_its_bias(device, kind):
    made = train("side_stream", make=lambda: Shared(kind), device=device)
    check_same(made, train(None, make=lambda: Shared(kind), device=device))


def test_gradients_that_are_asked_for_are_plain_tensors(late):
    def loop(number, model, optimizer, fusion, handle):
        if number < 2 or fusion is None:
            return
        del late[:]
        params = list(model.parameters())
        kinds = {type(g) for g in torch.autograd.grad(model(torch.ones(3, 4)).sum(), params)}
        assert kinds == {torch.Tensor}
        assert not late

    check_same(train("side_stream", loop=loop), train(None, loop=loop))


def test_a_layer_with_a_hook_in_backward_is_waited_for(late):
    seen = []

    def make():
        model = net()
        model[2].register_full_backward_hook(lambda module, *_: seen.append(module.weight.detach().clone()))
        return model

    made = train("side_stream", make=make)
    assert late
    assert 1 not in late
    check_same(made, train(None, make=make))


def test_a_second_fusion_is_followed_too(late):
    model = net()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    fusion, handle = attach(model, optimizer, "side_stream")

    def step():
        model(torch.ones(3, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    assert late
    fusion.detach()
    del late[:]
    step()
    assert not late
    assert "follow" not in handle.explain()
    fuse(model, optimizer, "backward")
    step()
    step()
    assert late
    assert "follow" in handle.explain()


@pytest.mark.parametrize("policy", ["side_stream", "joint"])
def test_a_weight_gradient_that_fails(policy, monkeypatch):
    """For want of memory, say: the next step is taken as if nothing had happened."""
    model, optimizer, fusion, x = at_work(policy)
    loss = model(x).square().mean()
    calls = []

    def fail(*_):
        calls.append(1)
        if len(calls) == 3:
            raise MemoryError("none left")
        return real(*_)

    real = split_ops._linear_weight
    monkeypatch.setattr(split_ops, "_linear_weight", fail)
    with pytest.raises(MemoryError):
        loss.backward()
    fusion.accept_partial()
    optimizer.zero_grad()
    monkeypatch.setattr(split_ops, "_linear_weight", real)
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    assert torch.isfinite(loss)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
def test_gradients_that_accumulate_on_another_stream():
    """As after a warm-up on a stream whose last loss is still there."""

    def run(policy):
        model = net().cuda()
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        if policy is not None:
            attach(model, optimizer, policy)
        x = torch.ones(64, 4, device="cuda")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        kept = []
        for number in range(8):
            with torch.cuda.stream(side if number < 3 else torch.cuda.current_stream()):
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            kept.append(loss)
            torch.cuda.current_stream().wait_stream(side)
        return torch.stack(kept), [p.detach() for p in model.parameters()]

    (losses, weights), (expected, stock) = run("side_stream"), run(None)
    assert torch.equal(losses, expected)
    assert all(torch.equal(a, b) for a, b in zip(weights, stock, strict=True))


def test_what_is_traced_by_a_mode_that_sees_operations():
    def train(attached):
        model = net()
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        handles = [fuse(model, optimizer, "forward"), reorder(model, "side_stream")] if attached else []
        outputs = []
        for number in range(4):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(number))
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            outputs.append(make_fx(model)(x)(x).detach())
        for handle in handles:
            handle.detach()
        return [*outputs, *model.parameters()]

    assert all(map(torch.equal, train(True), train(False)))
