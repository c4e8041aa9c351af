"""Split layers against stock ones: outputs and gradients, bit for bit."""

import copy
import gc
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from gradweave._runtime.split_calls.gradient_node import Pending, Tap
from gradweave._runtime.split_calls.queue import InLine, WeightGradientQueue
from gradweave._runtime.split_calls.queued_calls import QueuedCalls
from gradweave._runtime.split_calls.shared_nodes import Call, SharedTap
from gradweave._runtime.split_calls.task import Task


def weights_of(model):
    layers = (m for m in model.modules() if isinstance(m, (nn.Linear, nn.modules.conv._ConvNd)))
    return {number: (m.weight, m.bias) for number, m in enumerate(layers)}


def gradients(model, x, *, split, delayed=True, budget=None, autocast=False, backwards=1, loss=None):
    """Output, input gradient and weight gradients of a forward and backward, or several."""
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_(x.is_floating_point())
    queue = WeightGradientQueue(InLine(), budget)
    model.zero_grad()
    for _ in range(backwards):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            if split:
                with QueuedCalls(queue, weights_of(model) if delayed else None):
                    out = model(x)
            else:
                out = model(x)
        (loss or (lambda y: y.float().square().sum()))(out).backward()
    assert queue.held == 0
    return [out.detach(), x.grad, *(p.grad for p in model.parameters())], queue


def check(model, x, **options):
    made, queue = gradients(model, x, split=True, **options)
    kept = {key: value for key, value in options.items() if key in ("autocast", "backwards", "loss")}
    expected, _ = gradients(copy.deepcopy(model), x, split=False, **kept)
    assert len(made) == len(expected)
    for one, other in zip(made, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.dtype == other.dtype
            assert one.stride() == other.stride()
            assert torch.equal(one, other)
    return queue


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


ways = pytest.mark.parametrize(("delayed", "budget"), [(True, None), (True, 0), (True, 4096), (False, None)])
precisions = pytest.mark.parametrize("autocast", [False, True])


@ways
@precisions
@pytest.mark.parametrize("shape", [(5, 8), (2, 5, 8), (2, 3, 4, 8), (0, 8)])
@pytest.mark.parametrize("bias", [True, False])
def test_linear(shape, bias, autocast, delayed, budget):
    model = nn.Sequential(nn.Linear(8, 16, bias=bias), nn.GELU(), nn.Linear(16, 4, bias=bias))
    queue = check(model, torch.randn(shape), autocast=autocast, delayed=delayed, budget=budget)
    if budget is not None:
        assert queue.most_held <= budget


CONVOLUTIONS = {
    "1d": (lambda: nn.Conv1d(4, 6, 3, padding=1), (2, 4, 9)),
    "2d": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1), (2, 4, 9, 9)),
    "2d, no bias": (lambda: nn.Conv2d(4, 6, 1, bias=False), (2, 4, 5, 5)),
    "2d, depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4, dilation=2), (2, 4, 9, 9)),
    "2d, groups": (lambda: nn.Conv2d(4, 8, 3, groups=2, padding="valid"), (2, 4, 9, 9)),
    "2d, same": (lambda: nn.Conv2d(4, 8, 3, padding="same"), (2, 4, 9, 9)),
    "2d, reflect": (lambda: nn.Conv2d(4, 8, 3, padding=1, padding_mode="reflect"), (2, 4, 9, 9)),
    "3d": (lambda: nn.Conv3d(2, 3, (1, 3, 2)), (2, 2, 4, 5, 5)),
    "transposed 1d": (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2), (2, 4, 9)),
    "transposed 2d": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1, groups=2), (2, 4, 9, 9)),
    "transposed 3d": (lambda: nn.ConvTranspose3d(2, 3, 2, dilation=2), (1, 2, 4, 4, 4)),
    "empty": (lambda: nn.Conv2d(4, 6, 3), (0, 4, 9, 9)),
    "unbatched": (lambda: nn.Conv2d(4, 6, 3), (4, 9, 9)),
}


@precisions
@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize(("delayed", "budget"), [(True, None), (True, 0), (False, None)])
def test_convolutions(name, autocast, delayed, budget):
    make, shape = CONVOLUTIONS[name]
    model = nn.Sequential(make(), nn.ReLU())
    check(model, torch.randn(shape), autocast=autocast, delayed=delayed, budget=budget)


@precisions
def test_channels_last(autocast):
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8))
    model = model.to(memory_format=torch.channels_last)
    check(model, torch.randn(2, 4, 9, 9).to(memory_format=torch.channels_last), autocast=autocast)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 5), st.booleans(), st.booleans(), st.integers(0, 400))
def test_linear_of_any_layout(inputs, outputs, rows, transposed, bias, budget):
    model = nn.Linear(inputs, outputs, bias=bias)
    x = torch.randn(inputs, rows).t() if transposed else torch.randn(rows, inputs)
    check(model, x, budget=budget)
    check(model, torch.randn(2, inputs, rows).transpose(1, 2) if transposed else torch.randn(2, rows, inputs))


class Attends(nn.Module):
    def __init__(self, ways):
        super().__init__()
        sizes = {"kdim": 6, "vdim": 6} if ways == "of other widths" else {}
        self.ways = ways
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, bias=ways != "without biases", **sizes)

    def forward(self, x):
        x = x + 1
        other = {"to itself": x, "of other widths": x[..., :6]}.get(self.ways, x * 2)
        weights = self.ways == "with its weights"
        return self.attention(x, other, other, need_weights=weights, attn_mask=torch.ones(5, 5).tril() == 0)[0]


@ways
@precisions
@pytest.mark.parametrize("what", ["to itself", "to another", "of other widths", "with its weights", "without biases"])
def test_attention(what, autocast, delayed, budget, monkeypatch):
    model, left = Attends(what), []
    for kind in (Pending, Call):
        monkeypatch.setattr(kind, "leave", lambda self, task, leave=kind.leave: (left.append(self), leave(self, task)))
    check(model, torch.randn(2, 5, 8), autocast=autocast, delayed=delayed, budget=budget)
    projections = {"to itself": 2, "of other widths": 1 if autocast else 4}.get(what, 3)
    assert len(left) == projections


class AttendsTwice(nn.Module):
    """To latents that are a leaf, with weights that are used twice."""

    def __init__(self):
        super().__init__()
        self.latents = nn.Parameter(torch.randn(4, 11, 24))
        self.attention = nn.MultiheadAttention(32, 4, kdim=24, vdim=24, batch_first=True)

    def forward(self, x):
        for _ in range(2):
            x = self.attention(x, self.latents, self.latents, need_weights=False)[0]
        return x


@precisions
def test_attention_twice_to_a_leaf(autocast):
    check(AttendsTwice(), torch.randn(4, 9, 32), autocast=autocast)


def test_attention_is_made_of_what_torch_is_made_of_now(monkeypatch):
    model, x, seen = nn.MultiheadAttention(8, 2), torch.randn(5, 3, 8), []
    real = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: (seen.append(1), real(*a, **k))[1])
    with QueuedCalls(WeightGradientQueue(InLine())):
        model(x, x, x, need_weights=False)
    assert seen


def test_attention_that_another_mode_looks_at_is_not_taken_apart():
    class Mine(TorchFunctionMode):
        seen = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.seen += func is F.multi_head_attention_forward
            return func(*args, **(kwargs or {}))

    model, x = nn.MultiheadAttention(8, 2), torch.randn(5, 3, 8)
    with Mine() as mode, QueuedCalls(WeightGradientQueue(InLine())):
        model(x, x, x)[0].sum().backward()
    assert mode.seen == 1


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.mix = nn.Linear(8, 8)

    def forward(self, x):
        x = self.mix(torch.tanh(self.mix(self.embedding(x))))
        return F.linear(x, self.embedding.weight)


@pytest.mark.parametrize("backwards", [1, 3])
@ways
def test_tied_and_reused_weights_and_accumulation(delayed, budget, backwards):
    check(Tied(), torch.randint(0, 11, (3, 5)), delayed=delayed, budget=budget, backwards=backwards)


def test_frozen_weights_and_biases():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].weight.requires_grad_(False)
    model[1].bias.requires_grad_(False)
    model[2].requires_grad_(False)
    check(model, torch.randn(3, 8))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.two(checkpoint(lambda x: torch.tanh(self.one(x)), x, use_reentrant=reentrant))

    check(Checkpointed(), torch.randn(3, 8))


def test_hooks_see_the_whole_gradient_once():
    def count(split):
        model = Tied()
        seen = []
        for p in model.parameters():
            p.register_hook(lambda grad: seen.append(grad.clone()) or grad * 2)
            p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        return gradients(model, torch.randint(0, 11, (3, 5)), split=split)[0], seen

    torch.manual_seed(1)
    made, seen = count(True)
    torch.manual_seed(1)
    expected, stock = count(False)
    assert all(torch.equal(a, b) for a, b in zip(made[2:], expected[2:], strict=True))
    assert len(seen) == len(stock) == 6
    assert sum(float(x.sum()) for x in seen) == pytest.approx(sum(float(x.sum()) for x in stock))


def test_all_input_gradients_come_before_delayed_weight_gradients():
    order = []

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, name):
            ctx.name = name
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            order.append(ctx.name)
            return grad, None

    model = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    for index, layer in enumerate(model):
        layer.weight.register_post_accumulate_grad_hook(lambda _, index=index: order.append(f"W{index}"))
    for delayed, expected in ((True, "X2 X1 X0 W2 W1 W0"), (False, "W2 X2 W1 X1 W0 X0")):
        order.clear()
        x = torch.randn(2, 4, requires_grad=True)
        with QueuedCalls(WeightGradientQueue(InLine()), weights_of(model) if delayed else None):
            for index, layer in enumerate(model):
                x = layer(Noted.apply(x, f"X{index}"))
        x.sum().backward()
        assert " ".join(order) == expected


@precisions
def test_second_derivatives(autocast):
    def both(split):
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Conv1d(3, 2, 2))
        x = torch.randn(2, 3, 4, requires_grad=True)
        queue = WeightGradientQueue(InLine())
        with (
            QueuedCalls(queue, weights_of(model)) if split else torch.enable_grad(),
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        ):
            loss = model(x).float().square().sum()
        first = torch.autograd.grad(loss, [x, *model.parameters()], create_graph=True)
        return [*first, *torch.autograd.grad(sum(g.square().sum() for g in first), [x, *model.parameters()])]

    torch.manual_seed(2)
    made = both(True)
    torch.manual_seed(2)
    tolerance = {"rtol": 0.05, "atol": 0.05} if autocast else {}
    for one, other in zip(made, both(False), strict=True):
        torch.testing.assert_close(one, other, **tolerance)


def test_a_weight_changed_before_backward_is_an_error():
    model = nn.Linear(4, 4)
    with QueuedCalls(WeightGradientQueue(InLine())):
        loss = model(torch.randn(2, 4, requires_grad=True)).sum()
    with torch.no_grad():
        model.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_backward_that_fails_can_be_followed_by_another():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ValueError("on purpose")

    model = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    queue = WeightGradientQueue(InLine())
    with QueuedCalls(queue, weights_of(model)):
        x = model[0](torch.randn(2, 4, requires_grad=True))
        loss = model[2](model[1](Fails.apply(x))).sum()
    with pytest.raises(ValueError, match="on purpose"):
        loss.backward()
    assert queue.held > 0
    del loss, x
    model.zero_grad()
    x = torch.randn(2, 4)
    with QueuedCalls(queue, weights_of(model)):
        model[2](model[1](model[0](x))).sum().backward()
    gc.collect()
    assert queue.held == 0
    made = [p.grad for p in model.parameters()]
    model.zero_grad()
    model[2](model[1](model[0](x))).sum().backward()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), made, strict=True))


def test_no_grad_and_function_transforms_run_stock():
    model = nn.Linear(4, 4)
    x = torch.randn(2, 4)
    with QueuedCalls(WeightGradientQueue(InLine())):
        with torch.no_grad():
            assert not model(x).requires_grad
        weights = dict(model.named_parameters())
        made = torch.func.grad(lambda w: torch.func.functional_call(model, w, (x,)).sum())(weights)
    assert torch.equal(made["weight"], x.sum(0).expand(4, 4))


def test_gradients_of_inputs_alone_leave_nothing_behind():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    queue = WeightGradientQueue(InLine())
    x = torch.randn(2, 4, requires_grad=True)
    with QueuedCalls(queue, weights_of(model)):
        loss = model(x).sum()
    expected = torch.autograd.grad(model(x).sum(), [x, model[2].weight])
    made = torch.autograd.grad(loss, x, retain_graph=True)[0]
    assert queue.held == 0
    assert torch.equal(made, expected[0])
    made = torch.autograd.grad(loss, model[2].weight, retain_graph=True)[0]
    assert torch.equal(made, expected[1])
    loss.backward(inputs=[model[0].weight], retain_graph=True)
    loss.backward(inputs=[model[0].weight])
    assert queue.held == 0
    assert torch.equal(model[0].weight.grad, 2 * torch.autograd.grad(model(x).sum(), model[0].weight)[0])


def test_several_forwards_before_one_backward():
    def gradients_of(split):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        queue = WeightGradientQueue(InLine(), 40)
        total = 0
        for _ in range(2):
            with QueuedCalls(queue, weights_of(model)) if split else torch.enable_grad():
                total = total + model(torch.randn(3, 4)).square().sum()
        total.backward()
        assert queue.most_held <= 40
        return [p.grad for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(gradients_of(True), gradients_of(False), strict=True))


@pytest.mark.parametrize("shape", [(2, 4), (2, 3, 4), (2, 2, 3, 4)])
@pytest.mark.parametrize("bias", [True, False])
def test_results_changed_in_place(shape, bias):
    check(nn.Sequential(nn.Linear(4, 5, bias=bias), nn.ReLU(inplace=True), nn.Linear(5, 2)), torch.randn(shape))
    check(nn.Sequential(nn.Conv1d(4, 5, 1, bias=bias), nn.ReLU(inplace=True)), torch.randn(2, 4, 3))


@pytest.mark.parametrize("uses", [2, 4])
@precisions
def test_one_layer_used_many_times(uses, autocast):
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x):
            for _ in range(uses):
                x = torch.tanh(self.layer(x))
            return x

    check(Loop(), torch.randn(5, 6), autocast=autocast)


class Binary(nn.Linear):
    """Puts another tensor in the place of its weight in every forward."""

    def forward(self, x):
        if not hasattr(self, "original"):
            self.original = self.weight.data.clone()
        self.weight.data = self.original.sign()
        return F.linear(x, self.weight, self.bias)


def test_weights_that_are_replaced_in_forward():
    check(nn.Sequential(Binary(4, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(3, 4))


def test_odd_shapes_run_stock():
    x = torch.randn(3, 4)
    for weight, bias in (
        (torch.randn(4, requires_grad=True), None),
        (torch.randn(2, 4, requires_grad=True), torch.randn(1, 2, requires_grad=True)),
        (torch.randn(0, 4, requires_grad=True), torch.randn(0, requires_grad=True)),
    ):
        with QueuedCalls(WeightGradientQueue(InLine())):
            F.linear(x, weight, bias).sum().backward()
        made, weight.grad = weight.grad, None
        F.linear(x, weight, bias).sum().backward()
        assert torch.equal(made, weight.grad)


def test_gradients_are_handed_over_and_not_copied():
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))

    def copies(split):
        model.zero_grad()
        with QueuedCalls(WeightGradientQueue(InLine()), weights_of(model)) if split else torch.enable_grad():
            loss = model(torch.randn(2, 16)).sum()
        with torch.profiler.profile() as profile:
            loss.backward()
        return sum(event.count for event in profile.key_averages() if event.key == "aten::copy_")

    assert copies(True) <= copies(False)


def test_nothing_is_left_behind_by_many_steps():
    model = nn.Sequential(nn.Linear(4, 4), nn.Conv1d(3, 3, 1), nn.Linear(4, 4))
    queue = WeightGradientQueue(InLine())

    def alive():
        gc.collect()
        return sum(type(one) in (Tap, Pending, Task, SharedTap, Call) for one in gc.get_objects())

    counts = []
    for number in range(8):
        with QueuedCalls(queue, weights_of(model)):
            loss = model(torch.randn(2, 3, 4)).sum()
        if number % 2:
            loss.backward()
        del loss
        counts.append(alive())
    assert counts[-1] <= counts[0]


def test_two_threads_train_one_model():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    queue = WeightGradientQueue(InLine(), 64)
    expected = torch.autograd.grad(model(torch.ones(2, 4)).sum(), list(model.parameters()))
    wrong = []

    def work():
        for _ in range(100):
            with QueuedCalls(queue, weights_of(model)):
                loss = model(torch.ones(2, 4)).sum()
            made = torch.autograd.grad(loss, list(model.parameters()))
            if not all(torch.equal(a, b) for a, b in zip(made, expected, strict=True)):
                wrong.append(made)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
