"""Models and loops that are unlike most: the eager result, or an error."""

import copy
import pickle
from collections import deque

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

import gradweave
from compiler.models import adamw, assert_identical, batches, loss_fn, make, train
from gradweave.compiler import program
from gradweave.errors import GradweaveError


def _counting(function, calls):
    def counted(*args, **named):
        calls.append(None)
        return function(*args, **named)

    return counted


class Sum(nn.Module):
    """Two parameters with one and the same gradient."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Parameter(torch.randn(5, 48)), nn.Parameter(torch.randn(5, 48))
        self.shift = nn.Parameter(torch.zeros(7))

    def forward(self, x):
        return F.linear(x, self.one + self.two) + self.shift.sum()


@pytest.mark.parametrize("scaled", [False, True])
def test_parameters_with_one_gradient_are_clipped_and_unscaled_once(scaled):
    def run(lower):
        model = Sum()
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=scaled)
        step = None
        if lower:
            step = gradweave.compile(model, loss_fn, optimizer, lower=lower, max_grad_norm=0.1, scaler=scaler)
        for x, y in batches(4):
            if step:
                step(x, y)
                continue
            scaler.scale(loss_fn(model, x, y)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return model, optimizer, torch.zeros(1)

    assert_identical(run("replay"), run(None))


class Heads(nn.Module):
    """Batches use one of two heads."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.heads = nn.ModuleList(nn.Linear(48, 5) for _ in range(2))

    def forward(self, x, which):
        return self.heads[which](x)


def test_micro_batches_that_use_different_parameters():
    def by_head(model, x, y, which):
        return F.cross_entropy(model(x, which), y)

    def run(lower):
        model = Heads()
        optimizer = adamw(model.parameters())
        step = gradweave.compile(model, by_head, optimizer, lower=lower, max_grad_norm=1.0) if lower else None
        for number, (x, y) in enumerate(batches(12)):
            last = number % 2 == 1
            if step and last:
                step(x, y, 1)
            elif step:
                with step.no_update():
                    step(x, y, 0)
            else:
                by_head(model, x, y, int(last)).backward()
                if last:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
        return model, optimizer, torch.zeros(1)

    assert_identical(run("replay"), run(None))


def test_hooks(warned):
    model = make("mlp")
    optimizer = adamw(model.parameters())
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(None))
    step = gradweave.compile(model, loss_fn, optimizer, lower="replay")
    data = list(batches(4))
    for x, y in data:
        step(x, y)
    assert len(calls) == 4
    seen, before = [], model[0].weight.detach().clone()
    hook = model[0].weight.register_hook(lambda grad: grad * 0)
    handle = optimizer.register_step_pre_hook(lambda *_: seen.append(model[0].weight.grad.count_nonzero().item()))
    for p in model.parameters():
        optimizer.state[p]["exp_avg"].zero_()
    optimizer.param_groups[0]["weight_decay"] = 0.0
    step(*data[0])
    assert seen == [0]
    assert torch.equal(model[0].weight, before)
    (message,) = warned()
    assert "step hooks" in message
    hook.remove()
    handle.remove()
    step(*data[0])
    assert step.eager_reason is None
    assert not torch.equal(model[0].weight, before)


@pytest.mark.parametrize("lower", ["replay", "inductor"])
def test_state_of_another_kind_makes_a_new_graph(lower):
    def each(number, model, optimizer):
        if number == 3:
            for entry in optimizer.state.values():
                entry["exp_avg_sq"] = entry["exp_avg_sq"].double()

    made, expected = train("small", lower, each=each), train("small", each=each)
    torch.testing.assert_close(made[2], expected[2], rtol=1e-5, atol=0)


def test_numpy_rates_need_one_graph(monkeypatch):
    numpy = pytest.importorskip("numpy")
    made = []
    monkeypatch.setattr(program, "trace_step", _counting(program.trace_step, made))

    def each(number, model, optimizer):
        optimizer.param_groups[0]["lr"] = numpy.float64(0.01 / (1 + number))

    assert_identical(train("mlp", "replay", each=each), train("mlp", each=each))
    assert len(made) == 1


def test_a_step_is_neither_copied_nor_saved():
    model = make("mlp")
    step = gradweave.compile(model, loss_fn, adamw(model.parameters()))
    with pytest.raises(GradweaveError, match="cannot be copied"):
        copy.deepcopy(step)
    with pytest.raises(GradweaveError, match="cannot be saved"):
        pickle.dumps(step)


def test_a_loss_of_many_elements_is_refused():
    model = make("mlp")
    step = gradweave.compile(model, lambda model, x, y: model(x), adamw(model.parameters()))
    with pytest.raises(GradweaveError, match="one element"):
        step(*next(batches(1)))


@pytest.mark.parametrize("kind", ["zero-dimensional state", "asgd"])
def test_scaling_skips_all_state_of_a_compiled_step(kind):
    class Scalar(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.inner = nn.Linear(48, 5)
            self.scale = nn.Parameter(torch.tensor(1.0))

        def forward(self, x):
            return self.inner(x) * self.scale

    class Normalised(optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    size = self.state[p].setdefault("size", torch.ones(()))
                    size.mul_(0.9).add_(p.grad.norm(), alpha=0.1)
                    p.sub_(p.grad / size, alpha=group["lr"])

    def run(lower):
        model = Scalar()
        optimizer = Normalised(model.parameters()) if kind != "asgd" else optim.ASGD(model.parameters(), t0=2)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        step = gradweave.compile(model, loss_fn, optimizer, lower=lower, scaler=scaler) if lower else None
        for number, (x, y) in enumerate(batches(7)):
            x = x * float("inf") if number == 4 else x
            if step:
                step(x, y)
                continue
            scaler.scale(loss_fn(model, x, y)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return [*model.parameters(), *(v for e in optimizer.state.values() for v in e.values())]

    for mine, theirs in zip(run("inductor"), run(None), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def changed_in_a_list(number, model, optimizer):
    optimizer.param_groups[0]["betas"][0] = 0.9 - 0.1 * number


def changed_key(number, model, optimizer):
    if number == 3:
        optimizer.param_groups[0]["trust"] = 0.1


class Trusting(optim.SGD):
    """Reads a key that may not be there."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(group.get("trust", 1.0))
        return super().step(closure)


@pytest.mark.parametrize(
    ("make_optimizer", "each"),
    [
        (lambda p: optim.NAdam(p, lr=1e-2, betas=[0.9, 0.99]), changed_in_a_list),
        (lambda p: Trusting(p, lr=0.1), changed_key),
    ],
    ids=["list", "new key"],
)
def test_hyperparameters_in_lists_and_under_new_keys(make_optimizer, each):
    made, expected = (train("mlp", lower, make_optimizer, each=each) for lower in ("replay", None))
    assert torch.equal(made[2], expected[2])
    for mine, theirs in zip(made[0].parameters(), expected[0].parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_scaler_that_is_loaded_anew():
    model = make("mlp")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
    step = gradweave.compile(model, loss_fn, adamw(model.parameters()), lower="replay", scaler=scaler)
    data = list(batches(4))
    step(*data[0])
    step(*data[1])
    scaler.load_state_dict({**scaler.state_dict(), "growth_interval": 1, "growth_factor": 4.0, "_growth_tracker": 0})
    step(*data[2])
    assert scaler.get_scale() == 32.0


def test_padding_leaves_masks_false():
    def masked(model, x, mask):
        return (model(x).square().mean(1) * mask).sum() / mask.sum()

    model = make("mlp")
    optimizer = adamw(model.parameters())
    step = gradweave.compile(model, masked, optimizer, lower="replay", new_shapes="pad")
    x, _ = next(batches(1))
    step(x, torch.ones(6, dtype=torch.bool))
    step(x, torch.ones(6, dtype=torch.bool))
    expected = masked(model, x[:4], torch.ones(4, dtype=torch.bool)).detach()
    torch.testing.assert_close(step(x[:4], torch.ones(4, dtype=torch.bool)), expected)


@pytest.mark.parametrize("edit", ["replaced", "other step"])
def test_gradients_of_others_between_micro_batches_count(edit):
    def run(lower):
        model = make("mlp")
        optimizer = adamw(model.parameters())
        steps = [gradweave.compile(model, loss_fn, optimizer, lower=lower) for _ in range(2)] if lower else []
        for number, (x, y) in enumerate(batches(8)):
            last = number % 2 == 1
            step = steps[last and edit == "other step"] if steps else None
            if last and edit == "replaced":
                for p in model.parameters():
                    p.grad = p.grad * 0.5
            if step and last:
                step(x, y)
            elif step:
                with step.no_update():
                    step(x, y)
            else:
                loss_fn(model, x, y).backward()
                if last:
                    optimizer.step()
                    optimizer.zero_grad()
        return model, optimizer, torch.zeros(1)

    assert_identical(run("replay"), run(None))


def test_a_batch_that_fails_in_forward_changes_nothing():
    torch.manual_seed(0)
    model = nn.Embedding(10, 3)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    step = gradweave.compile(model, lambda model, x: model(x).square().mean(), optimizer, lower="replay")
    for _ in range(3):
        step(torch.tensor([1, 2]))
    before = [model.weight.detach().clone(), optimizer.state[model.weight]["momentum_buffer"].clone()]
    with pytest.raises(IndexError):
        step(torch.tensor([1, 20]))
    after = [model.weight, optimizer.state[model.weight]["momentum_buffer"]]
    assert all(map(torch.equal, before, after))
    step(torch.tensor([1, 2]))
    assert step.eager_reason is None


def test_tensors_of_a_batch_that_require_a_gradient_get_it(warned):
    def run(lower):
        model = make("small")
        optimizer = adamw(model.parameters())
        step = gradweave.compile(model, loss_fn, optimizer, lower=lower) if lower else None
        losses, inputs = [], []
        for number, (x, y) in enumerate(batches(6)):
            x.requires_grad_(number in (0, 3))
            inputs.append(x)
            if step:
                losses.append(step(x, y))
                continue
            losses.append(loss_fn(model, x, y))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        return (model, optimizer, torch.stack(losses).detach()), [x.grad for x in inputs]

    (made, grads), (expected, other) = run("replay"), run(None)
    assert_identical(made, expected)
    assert [g is None for g in grads] == [g is None for g in other]
    assert all(torch.equal(a, b) for a, b in zip(grads, other, strict=True) if a is not None)
    (message,) = warned()
    assert "a tensor of the batch requires a gradient" in message


def test_a_model_that_loss_fn_calls_besides_gets_no_gradients():
    torch.manual_seed(0)
    maker, judge = nn.Linear(4, 6), nn.Linear(6, 1)
    step = gradweave.compile(maker, lambda maker, z: -judge(maker(z)).mean(), adamw(maker.parameters()), lower="replay")
    for _ in range(3):
        step(torch.ones(2, 4))
        assert all(p.grad is None for p in judge.parameters())
    judge.weight.grad = torch.ones_like(judge.weight)
    with torch.compiler.set_stance("force_eager"):
        step(torch.ones(2, 4))
    assert torch.equal(judge.weight.grad, torch.ones_like(judge.weight))


def test_a_deque_with_a_maxlen_forgets_what_is_too_much(warned):
    def run(lower):
        history = deque([1.0], maxlen=3)

        def loss(model, x, y):
            history.append(history[-1] + len(history))
            return loss_fn(model, x, y) * history[0]

        return train("linear", lower, loss=loss), list(history)

    (made, history), (expected, other) = run("replay"), run(None)
    assert_identical(made, expected)
    assert history == other
    (message,) = warned()
    assert "deque" in message
