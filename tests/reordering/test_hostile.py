"""Loops and surroundings that are hard on reorder(): stock's bits, or a refusal that leaves nothing behind."""

import copy
import io
import multiprocessing
import threading
import warnings

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

from gradweave.errors import UnsupportedError
from gradweave.fusion import fuse
from gradweave.reordering import api
from gradweave.reordering.api import is_reordered, reorder
from reordering.test_cross_step import crossing_costs

POLICIES = ["side_stream", "joint"]
every_policy = pytest.mark.parametrize("policy", POLICIES)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


class Uses(nn.Module):
    """Layers that are used several times, in every way that sums their gradients up."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6)
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.first.weight
        self.same_bias = nn.Linear(6, 6)
        self.same_bias.bias = self.first.bias
        self.table = nn.Embedding(6, 6)
        self.head = nn.Linear(6, 6, bias=False)
        self.head.weight = self.table.weight
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.shared = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.conv = nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, x):
        tokens = (x > 0).long()
        x = torch.tanh(self.first(x)) + self.table(tokens).mean(-2)
        x = torch.tanh(self.tied(self.shared(self.shared(x))))
        x = torch.tanh(self.same_bias(self.first(x)) + self.normed(self.normed(x)))
        by_hand = self.same_bias.weight.to(torch.bfloat16)
        x = x + F.linear(F.linear(x.to(torch.bfloat16), by_hand), by_hand).to(x.dtype)
        x = self.conv(self.conv(x.unsqueeze(1))).squeeze(1)
        return self.head(x) + self.table(tokens).sum(-2) + self.head(torch.tanh(self.tied(x)))


def gradients(model, policy, loss):
    handle = None
    if policy is not None:
        handle = reorder(model, policy, **({} if policy == "side_stream" else {"costs": crossing_costs(model)}))
    loss(model).backward()
    if handle is not None:
        assert handle.most_bytes_held > 0
        handle.detach()
    return [p.grad for p in model.parameters()]


def assert_stock(make, policy, loss):
    made, stock = gradients(make(), policy, loss), gradients(make(), None, loss)
    assert all(torch.equal(a, b) for a, b in zip(made, stock, strict=True))


CONTEXTS = {
    "float32": [{"enabled": False}],
    "one context": [{}],
    "float16": [{"dtype": torch.float16}],
    "one context, no cache": [{"cache_enabled": False}],
    "a context each": [{}, {}, {}],
    "some": [{}, {"enabled": False}, {"cache_enabled": False}],
}


@every_policy
@pytest.mark.parametrize("make", [net, Uses])
@pytest.mark.parametrize("contexts", CONTEXTS)
def test_a_model_that_is_called_several_times_before_one_backward(make, contexts, policy):
    """Sums of low precision where autocast casts once, and the order in which they are added up."""

    def loss(model):
        generator = torch.Generator().manual_seed(1)
        total = 0.0
        for context in CONTEXTS[contexts]:
            with torch.autocast("cpu", **{"dtype": torch.bfloat16, **context}):
                for factor in range(1, 5 - len(CONTEXTS[contexts])):
                    total = total + factor * model(torch.randn(5, 6, generator=generator)).float().square().mean()
        return total

    assert_stock(make, policy, loss)


@pytest.mark.parametrize("is_view", [True, False])
@every_policy
def test_a_leaf_that_two_forwards_read_under_autocast(policy, is_view):
    def run(policy):
        x = torch.linspace(-1, 1, 30).view(5, 6)
        model, x = net(), (x if is_view else x.clone()).requires_grad_()

        def loss(model):
            with torch.autocast("cpu", torch.bfloat16):
                return model(x).float().square().mean() + model(x).float().mean()

        return [*gradients(model, policy, loss), x.grad]

    assert all(torch.equal(a, b) for a, b in zip(run(policy), run(None), strict=True))


@every_policy
def test_a_weight_that_is_put_elsewhere_before_backward(policy):
    def loss(model):
        out = model(torch.linspace(-1, 1, 12).view(2, 6)).square().mean()
        for p in model.parameters():
            p.data = p.data * 0.5
        return out

    assert_stock(Uses, policy, loss)


def test_biases_that_wake_up_between_two_forwards_of_one_backward():
    def loss(model):
        model[2].bias.requires_grad_(False)
        one = model(torch.ones(2, 6)).sum()
        model[2].bias.requires_grad_(True)
        return one + model(torch.full((2, 6), 0.5)).sum()

    assert_stock(net, "side_stream", loss)


def compiled(model, how, backend):
    if how == "torch.compile":
        return torch.compile(model, backend=backend)
    if how == "model.compile":
        model.compile(backend=backend)
    elif how == "a child":
        model[2].compile(backend=backend)
    else:
        model[2] = torch.compile(model[2], backend=backend)
    return model


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("how", ["torch.compile", "model.compile", "a child", "a child, wrapped"])
def test_what_is_compiled_behind_it_gives_the_same_bits(how, backend):
    def run(reordered):
        torch._dynamo.reset()
        model = net()
        if reordered:
            reorder(model, "side_stream")
        forward, optimizer = compiled(model, how, backend), optim.AdamW(model.parameters(), lr=0.01)
        for number in range(3):
            forward(torch.full((2, 6), 0.3 * number)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made, stock = run(True), run(False)
    assert all(torch.equal(a, b) for a, b in zip(made, stock, strict=True))
    assert torch.overrides._len_torch_function_stack() == 0


@pytest.mark.parametrize("how", ["model.compile", "a child", "a child, wrapped"])
def test_what_is_compiled_before_it_is_refused(how):
    model = net()
    parts = list(model)
    with pytest.raises(UnsupportedError, match=r"torch\.compile"):
        reorder(compiled(model, how, "eager"), "side_stream")
    assert_nothing_left(nn.Sequential(*parts[:2]))
    assert not hooks_of(model)


def hooks_of(model):
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
    return [hook for module in model.modules() for kind in kinds for hook in getattr(module, kind).values()]


def assert_nothing_left(model):
    assert not hooks_of(model)
    assert not is_reordered(model)
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.ones(2, 6)).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


def test_a_scripted_part_is_refused_and_nothing_is_left_behind():
    model = net()
    model[1] = torch.jit.script(nn.Tanh())
    with pytest.raises(UnsupportedError, match=r"torch\.jit\.script"):
        reorder(model, "side_stream")
    assert_nothing_left(model)


STEPS = {
    "the hook before": (nn.Module, "register_forward_pre_hook"),
    "the hook after": (nn.Module, "register_forward_hook"),
    "the hook on loading": (nn.Module, "register_load_state_dict_pre_hook"),
    "the updates": (api, "FusedUpdateDeferral"),
    "the nodes": (api, "SharedNodes"),
    "the queue": (api, "WeightGradientQueue"),
    "the layers": (api, "_layers"),
}


@pytest.mark.parametrize("step", STEPS)
def test_attaching_that_fails_at_any_step_leaves_nothing_behind(step, monkeypatch):
    def fails(*_, **__):
        raise MemoryError

    model = net()
    fusion = fuse(model, optim.SGD(model.parameters(), lr=0.1), "backward")
    before = hooks_of(model)
    with monkeypatch.context() as patched:
        patched.setattr(*STEPS[step], fails)
        with pytest.raises(MemoryError):
            reorder(model, "side_stream")
    assert hooks_of(model) == before
    assert not is_reordered(model)
    reorder(model, "side_stream").detach()
    fusion.detach()
    assert not hooks_of(model)


def test_lazy_layers_are_split_once_they_have_weights():
    def run(policy):
        torch.manual_seed(0)
        model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(3))
        handle = reorder(model, policy) if policy else None
        for number in range(3):
            torch.manual_seed(number)
            model(torch.full((2, 6), 0.1 * number)).square().sum().backward()
        assert handle is None or handle.most_bytes_held > 0
        return [p.grad for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run("side_stream"), run(None), strict=True))


@every_policy
def test_gradients_that_are_views_of_one_buffer(policy):
    def loss(model):
        flat = torch.zeros(sum(p.numel() for p in model.parameters()))
        for p, part in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True):
            p.grad = part.view_as(p)
        model(torch.ones(2, 6)).square().sum().backward()
        flat.mul_(0.5)
        assert flat.norm() > 0
        return model(torch.full((2, 6), 0.5)).square().sum()

    assert_stock(net, policy, loss)


@every_policy
def test_losses_whose_backwards_run_in_two_threads(policy):
    def run(policy):
        model = net()
        if policy:
            reorder(model, policy, **({} if policy == "side_stream" else {"costs": crossing_costs(model)}))
        losses = [model(torch.full((2, 6), 0.1 * number)).square().sum() for number in range(2)]
        threads = [threading.Thread(target=loss.backward) for loss in losses]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
        return [p.grad for p in model.parameters()]

    expected = run(None)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(run(policy), expected, strict=True))


def test_evaluation_in_threads_after_a_step():
    model = net()
    reorder(model, "side_stream")
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    seen = []

    def work():
        with torch.no_grad():
            seen.append(model(torch.ones(2, 6)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    with torch.no_grad():
        expected = copy.deepcopy(model)(torch.ones(2, 6))
    assert len(seen) == 4
    assert all(torch.equal(out, expected) for out in seen)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_trains_on():
    model = net()
    reorder(model, "side_stream")
    model(torch.ones(2, 6)).sum().backward()
    expected = copy.deepcopy([p.grad for p in model.parameters()])

    def child():
        model.zero_grad()
        model(torch.ones(2, 6)).sum().backward()
        assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), expected, strict=True))

    forked = multiprocessing.get_context("fork").Process(target=child)
    forked.start()
    forked.join(100)
    forked.kill()
    assert forked.exitcode == 0


def test_traced_and_exported_it_is_the_stock_model():
    model, x = net(), torch.ones(2, 6)
    expected = copy.deepcopy(model)(x)
    with reorder(model, "side_stream") as handle:
        made = [torch.jit.trace(model, x), torch.export.export(model, (x,)).module()]
        for one in made:
            assert torch.equal(one(x), expected)
            one(x).sum().backward()
        assert handle.most_bytes_held == 0


def test_hooks_that_come_later_see_what_they_see_in_stock_order():
    def run(policy):
        model, seen = net(), []
        if policy:
            reorder(model, policy)
        for number in range(3):
            if number == 1:
                model[2].weight.register_hook(lambda grad: seen.append(grad.clone()) or grad * 2)
                model[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
                model[2].register_forward_hook(lambda _, __, out: seen.append(out.detach()))
                model[4].register_full_backward_hook(lambda _, grads, __: seen.append(grads[0]))
            model(torch.full((2, 6), 0.1 * number)).square().sum().backward()
        return sorted(seen, key=lambda one: (one.shape, float(one.sum()))), [p.grad for p in model.parameters()]

    (seen, made), (expected_seen, expected) = run("side_stream"), run(None)
    assert all(torch.equal(a, b) for a, b in zip([*made, *seen], [*expected, *expected_seen], strict=True))


def test_function_transforms_of_the_model_run_stock():
    model, x = net(), torch.ones(2, 6)
    transforms = {
        "jvp": lambda: torch.func.jvp(model, (x,), (x,))[1],
        "jacobian": lambda: torch.func.jacrev(model)(x),
        "vmap": lambda: torch.func.vmap(model)(x),
    }
    expected = {name: transform() for name, transform in transforms.items()}
    with reorder(model, "side_stream"):
        for name, transform in transforms.items():
            assert torch.equal(transform(), expected[name]), name


def test_forwards_that_have_their_backwards_one_by_one():
    """What a backward leaves alone of the graphs that are there is added up in stock order by the next."""

    def loss(model):
        first, second = model(torch.ones(2, 6)), model(torch.full((2, 6), 0.5))
        first.square().sum().backward()
        third = model(torch.full((2, 6), 0.2))
        (second.square().sum() + third.square().sum()).backward(retain_graph=True)
        return second.sum() + model(torch.full((2, 6), 0.3)).square().sum()

    assert_stock(Uses, "side_stream", loss)


@every_policy
def test_weights_may_be_swapped_while_a_graph_is_there(policy):
    model = net()
    reorder(model, policy, **({} if policy == "side_stream" else {"costs": crossing_costs(model)}))
    loss = model(torch.ones(2, 6)).sum()
    loss.backward()
    weight = model[2].weight
    torch.utils.swap_tensors(weight, nn.Parameter(torch.ones(16, 16)))
    assert weight.sum() == 256
    assert loss.isfinite()


def test_copies_made_in_the_middle_of_a_step_train_as_stock():
    model = net()
    reorder(model, "side_stream")
    loss = model(torch.ones(2, 6)).sum()
    written = io.BytesIO()
    torch.save(model, written)
    written.seek(0)
    loss.backward()
    for other in (copy.deepcopy(model), torch.load(written, weights_only=False)):
        other.zero_grad()
        assert not is_reordered(other)
        other(torch.ones(2, 6)).sum().backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_counters_see_one_forward_and_one_backward_a_step():
    """Nothing is run for the sake of a trial."""
    from gradweave._runtime.split_calls.queue import InlineLane
    from gradweave.reordering.auto import Trial

    model, forwards, backwards = net(), [], []
    api.Reordering(model, InlineLane(), None, trial=Trial(torch.device("cpu")))
    model[2].register_forward_hook(lambda *_: forwards.append(1))
    model[2].register_full_backward_hook(lambda *_: backwards.append(1))
    for number in range(1, 45):
        model(torch.ones(2, 6)).sum().backward()
        assert len(forwards) == len(backwards) == number
