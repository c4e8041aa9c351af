import copy
import io
import threading

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

import gradweave
from gradweave.compare.models import GPT, MobileNetV2
from gradweave.profile import measure_costs
from gradweave.reordering.api import ReorderingState, reorder
from gradweave.schedule.costs import Costs

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[
        pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    ]),
]  # fmt: skip
devices = pytest.mark.parametrize("device", DEVICES)


def small_gpt():
    return GPT(vocabulary=50, width=32, blocks=3, heads=2, tokens=16), torch.randint(0, 50, (4, 17))


def train(device, reordered, *, make=small_gpt, steps=5, each=lambda model: None, **options):
    torch.manual_seed(0)
    model, data = make()
    model, data = model.to(device), data.to(device)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    handle = reorder(model, **{"policy": "side_stream", **options}) if reordered else None
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(model(data[:, :-1]).flatten(0, 1), data[:, 1:].flatten())
        loss.backward()
        each(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return model, torch.stack(losses), handle


def same_weights(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


@devices
@pytest.mark.parametrize("budget", [None, 0, 20_000])
def test_training_is_the_stock_training_within_the_budget(device, budget):
    made, losses, handle = train(device, True, byte_budget=budget)
    expected, stock, _ = train(device, False)
    assert torch.equal(losses, stock)
    assert same_weights(made, expected)
    assert budget is None or handle.most_bytes_held <= budget
    assert budget == 0 or handle.most_bytes_held > 0


@devices
def test_a_convolutional_network(device):
    def gradients(reordered):
        torch.manual_seed(0)
        model = MobileNetV2(classes=10).to(device)
        x = torch.randn(2, 3, 64, 64, device=device)
        if reordered:
            reorder(model, "side_stream")
        with torch.backends.cudnn.flags(deterministic=True, benchmark=False):
            model(x).square().sum().backward()
        return [p.grad for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(gradients(True), gradients(False), strict=True))


def attention_losses(device, attach):
    """Training of torch's own transformer, encoder and decoder: attention to itself and to another."""
    torch.manual_seed(0)
    model = nn.Transformer(16, 2, 1, 2, 24, dropout=0.0, batch_first=True).to(device)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.randn(2, 5, 16, device=device), torch.randn(2, 3, 16, device=device)
    handles, losses = attach(model, optimizer, (x, y)), []
    for _ in range(4):
        loss = model(x, y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    for handle in handles:
        handle.detach()
    return torch.stack(losses), model


@devices
@pytest.mark.parametrize("way", ["side_stream", "joint", "backward", "forward", "cross_step"])
def test_torch_transformers(device, way):
    def attach(model, optimizer, batch):
        if way == "side_stream":
            return [reorder(model, way)]
        if way in ("backward", "forward"):
            return [gradweave.fuse(model, optimizer, mode=way), reorder(model, "side_stream")][::-1]
        costs = measure_costs(model, lambda m, x, y: m(x, y).square().mean(), optimizer, batch, rounds=1)
        assert {"encoder.layers.0.self_attn", "decoder.layers.1.self_attn"} <= {layer.name for layer in costs.layers}
        fusions = [gradweave.fuse(model, optimizer, mode="forward")] if way == "cross_step" else []
        return [reorder(model, way, costs=costs), *fusions]

    losses, model = attention_losses(device, attach)
    expected, stock = attention_losses(device, lambda *_: [])
    assert torch.equal(losses, expected)
    assert same_weights(model, stock)


def test_attaching_computes_no_parametrized_weight():
    model = nn.utils.parametrizations.spectral_norm(nn.MultiheadAttention(8, 2), "in_proj_weight")
    vector = model.parametrizations.in_proj_weight[0]._u
    before = vector.clone()
    with reorder(model, "side_stream"):
        assert torch.equal(vector, before)


def test_an_attention_without_a_joint_projection():
    class Own(nn.MultiheadAttention):
        def __init__(self):
            super().__init__(8, 2)
            del self.in_proj_weight
            self.qkv = nn.Linear(8, 24)

        def forward(self, x):
            return self.qkv(x)

    model, x = Own(), torch.randn(3, 8)
    expected = torch.autograd.grad(model(x).square().sum(), [model.qkv.weight, model.qkv.bias])
    with reorder(model, "side_stream") as handle:
        model(x).square().sum().backward()
        assert handle.most_bytes_held > 0
    assert torch.equal(model.qkv.weight.grad, expected[0])
    assert torch.equal(model.qkv.bias.grad, expected[1])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_evaluation_takes_the_fast_ways_of_torch():
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2).eval()
    x, mask = torch.randn(2, 6, 16), torch.zeros(2, 6, dtype=torch.bool)
    mask[0, 4:] = True
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=mask)
        assert not expected[0, 4:].any()  # only the fast way leaves out what is padding
        with reorder(model, "side_stream"):
            assert torch.equal(model(x, src_key_padding_mask=mask), expected)


def test_gradients_of_attention_projections_come_last():
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    came = []
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: came.append(name))
    x = torch.randn(2, 5, 8, requires_grad=True)
    x.register_hook(lambda _: came.append("input"))
    with reorder(model, "side_stream"):
        model(x).square().sum().backward()
    last = came[came.index("input") + 1 :]
    assert {"self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight"} <= set(last)


def test_gradients_are_all_there_when_backward_returns():
    def each(model):
        assert all(p.grad is not None for p in model.parameters())

    train("cpu", True, each=each)


def test_detached_and_copied_models_are_stock():
    model, data = small_gpt()
    with reorder(model, "side_stream") as handle:
        model(data[:, :-1]).sum().backward()
        held = handle.most_bytes_held
        assert held > 0
        twin = copy.deepcopy(model)
        saved = io.BytesIO()
        torch.save(model, saved)
        saved.seek(0)
        for other in (twin, torch.load(saved, weights_only=False)):
            other(data[:, :-1]).sum().backward()
            assert handle.most_bytes_held == held
            reorder(other, "side_stream").detach()
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
    model(data[:, :-1]).sum().backward()


def test_a_forward_or_backward_that_fails_leaves_nothing_behind():
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
            self.fail = ""

        def forward(self, x):
            x = self.one(x)
            if self.fail == "forward":
                raise ValueError("forward")
            x.register_hook(self.check)
            return self.two(x)

        def check(self, grad):
            if self.fail == "backward":
                raise ValueError("backward")

    model = Fails()
    x = torch.randn(2, 4)
    handle = reorder(model, "side_stream")
    model(x).sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    for fail in ("forward", "backward"):
        model.fail = fail
        with pytest.raises(ValueError, match=fail):
            model(x).sum().backward()
        assert torch.overrides._len_torch_function_stack() == 0
        model.fail = ""
        model.zero_grad()
        model(x).sum().backward()
        assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), expected, strict=True))
    assert handle._queue.held_bytes == 0


def test_evaluation_runs_stock():
    model, data = small_gpt()
    handle = reorder(model, "side_stream")
    with torch.no_grad():
        model(data[:, :-1])
    assert handle.most_bytes_held == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": "fastest"}, "policy"),
        ({"byte_budget": -1}, "byte_budget"),
        ({"policy": "joint"}, "costs"),
        ({"policy": "side_stream", "costs": Costs.uniform(2)}, "costs"),
        ({"policy": "cross_step"}, "costs"),
        ({"policy": "cross_step", "costs": Costs.uniform(2)}, 'mode="forward"'),
        ({"policy": "joint", "costs": Costs.uniform(2)}, "costs of .*: they have no layer of this model"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(gradweave.GradweaveError, match=message):
        reorder(nn.Linear(2, 2), **arguments)


def test_what_cannot_be_reordered_is_refused():
    model = nn.Sequential(nn.Linear(2, 2))
    with reorder(model, "side_stream"), pytest.raises(gradweave.GradweaveError, match="already"):
        reorder(model, "side_stream")
    with pytest.raises(gradweave.GradweaveError, match=r"torch\.compile"):
        reorder(torch.compile(model))
    with pytest.raises(gradweave.GradweaveError, match="DataParallel"):
        reorder(nn.DataParallel(model))
    with pytest.raises(gradweave.GradweaveError, match="no parameters"):
        reorder(nn.ReLU())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("budget", [None, 0])
def test_a_captured_step(budget):
    def run(reordered):
        torch.manual_seed(0)
        model, data = small_gpt()
        model, data = model.cuda(), data.cuda()
        optimizer = optim.AdamW(model.parameters(), lr=1e-2, fused=True, capturable=True)
        if reordered:
            reorder(model, "side_stream", byte_budget=budget)

        def step():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data[:, :-1]).flatten(0, 1), data[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            return loss

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for _ in range(20):
            graph.replay()
        torch.cuda.synchronize()
        return model

    assert same_weights(run(True), run(False))


@pytest.mark.parametrize("first", ["reorder", "fuse"])
@pytest.mark.parametrize("mode", ["forward", "backward"])
def test_with_fuse(mode, first):
    """Stock weights, whichever is attached first."""

    def run(woven):
        torch.manual_seed(0)
        model, data = small_gpt()
        optimizer = optim.AdamW(model.parameters(), lr=1e-2)
        attach = [lambda: reorder(model, "side_stream"), lambda: gradweave.fuse(model, optimizer, mode)]
        for one in (attach if first == "reorder" else attach[::-1]) if woven else ():
            one()
        for _ in range(6):
            F.cross_entropy(model(data[:, :-1]).flatten(0, 1), data[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model

    assert same_weights(run(True), run(False))


def test_a_compiled_step_refuses_a_reordered_model():
    model = nn.Linear(2, 2)
    with reorder(model, "side_stream"), pytest.raises(gradweave.GradweaveError, match="reordered"):
        gradweave.compile(model, lambda m, x: m(x).sum(), optim.SGD(model.parameters(), lr=0.1))


@devices
@pytest.mark.parametrize("budget", [None, 5_000])
def test_measured_and_planned(device, budget):
    torch.manual_seed(0)
    model, data = small_gpt()
    model, data = model.to(device), data.to(device)

    def loss_fn(model, data):
        return F.cross_entropy(model(data[:, :-1]).flatten(0, 1), data[:, 1:].flatten())

    costs = measure_costs(model, loss_fn, optim.AdamW(model.parameters()), (data,), rounds=2)
    made, losses, handle = train(device, True, policy="joint", costs=costs, byte_budget=budget)
    expected, stock, _ = train(device, False)
    assert torch.equal(losses, stock)
    assert same_weights(made, expected)
    assert budget is None or handle.most_bytes_held <= budget


def test_parametrized_weights_are_computed_once_per_forward():
    def outputs(reordered):
        torch.manual_seed(0)
        model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(20, 30)))
        if reordered:
            reorder(model, "side_stream")
        results = []
        for _ in range(3):
            model.zero_grad()
            results.append(model(torch.ones(2, 20)))
            results[-1].sum().backward()
        return [*results, *(p.grad for p in model.parameters())]

    assert all(torch.equal(a, b) for a, b in zip(outputs(True), outputs(False), strict=True))


def test_an_interrupt_in_forward_or_detaching_there_leaves_nothing_behind():
    class Stops(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.act = lambda: None

        def forward(self, x):
            self.act()
            return self.layer(x)

    def interrupt():
        raise KeyboardInterrupt

    model = Stops()
    handle = reorder(model, "side_stream")
    model.act = interrupt
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            model(torch.ones(1, 2))
    model.act = lambda: None
    model(torch.ones(1, 2)).sum().backward()
    assert torch.overrides._len_torch_function_stack() == 0
    assert handle.state is ReorderingState.ATTACHED
    model.act = handle.detach
    assert "_Linear" not in str(model(torch.ones(1, 2)).grad_fn)
    assert torch.overrides._len_torch_function_stack() == 0
    assert not model._forward_hooks
    assert handle.state is ReorderingState.DETACHED


def test_evaluation_in_another_thread_during_backward():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    reorder(model, "side_stream")

    def evaluate(grad):
        def work():
            with torch.no_grad():
                model(torch.ones(1, 4))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    def watch(_, __, out):
        if out.requires_grad:
            out.register_hook(evaluate)

    model[1].register_forward_hook(watch)
    model(torch.ones(2, 4)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_detaching_while_another_thread_is_in_forward():
    class Waits(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.inside, self.go_on = threading.Event(), threading.Event()

        def forward(self, x):
            self.inside.set()
            assert self.go_on.wait(100)
            return self.layer(x)

    model = Waits()
    handle = reorder(model, "side_stream")
    seen = []

    def work():
        seen.append(str(model(torch.ones(1, 2)).grad_fn))
        seen.append(torch.overrides._len_torch_function_stack())

    thread = threading.Thread(target=work)
    thread.start()
    assert model.inside.wait(100)
    handle.detach()
    assert handle.state is ReorderingState.DETACHING
    assert not handle.is_attached
    model.go_on.set()
    thread.join()
    assert handle.state is ReorderingState.DETACHED
    assert "_Linear" not in seen[0]
    assert seen[1] == 0
    assert not model._forward_hooks
