"""Variants of a step: found, made, replaced when they fail; hooks and gradients that come later."""

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.nn.utils import parametrize

import gradweave
from compiler.models import adamw, assert_identical, batches, both, loss_fn, make, train
from gradweave.compiler import program


def test_what_inductor_fails_at_is_replayed(monkeypatch, warned):
    from gradweave.compiler import lower

    def broken(*_, **__):
        raise AssertionError("on purpose")

    monkeypatch.setattr(lower, "compile_with_inductor", broken)
    made, expected, step = both(lambda: make("mlp"), loss_fn, list(batches(5)), "inductor", adamw)
    assert_identical(made, expected)
    assert step.eager_reason is None
    (message,) = warned()
    assert "Inductor" in message


@pytest.mark.parametrize("lower", ["replay", "inductor"])
def test_a_graph_that_fails_when_it_first_runs_changes_nothing_and_gives_way(lower, monkeypatch, warned):
    kind = program.Replay if lower == "replay" else program.Compiled

    def broken(*_):
        raise AssertionError("on purpose")

    monkeypatch.setattr(kind, "run", broken)
    made, expected, step = both(lambda: make("mlp"), loss_fn, list(batches(5)), lower, adamw)
    assert_identical(made, expected)
    assert (step.eager_reason is None) == (lower == "inductor")
    assert len(warned()) == 1


@pytest.fixture
def frail():
    """An operation whose backward fails when it is called the second time, in the first graph; and its calls."""
    calls = []

    @torch.library.custom_op("gradweave_tests::back", mutates_args=())
    def back(grad: torch.Tensor) -> torch.Tensor:
        calls.append(None)
        if len(calls) == 2:
            raise ValueError("on purpose")
        return grad.clone()

    @torch.library.custom_op("gradweave_tests::frail", mutates_args=())
    def frail(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    back.register_fake(torch.empty_like)
    frail.register_fake(torch.empty_like)
    frail.register_autograd(lambda _, grad: back(grad))
    return frail, calls


def test_a_graph_that_fails_late_in_its_first_backward_has_updated_nothing(frail, warned):
    operation, calls = frail

    class Frail(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.head = nn.Linear(48, 8), nn.Linear(8, 5)

        def forward(self, x):
            return self.head(operation(self.inner(x)))

    def run(compiled):
        torch.manual_seed(0)
        model, losses = Frail(), []
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        calls.clear()
        step = gradweave.compile(model, loss_fn, optimizer, lower="replay") if compiled else None
        for batch in batches(6):
            if step is not None:
                losses.append(step(*batch))
                continue
            calls.clear()  # does not fail
            losses.append(loss_fn(model, *batch))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer, torch.stack(losses).detach()

    assert_identical(run(compiled=True), run(compiled=False))
    (message,) = warned()
    assert "ValueError: on purpose" in message


def test_gradients_that_are_there_already_count():
    def run(lower):
        model = make("mlp")
        optimizer = adamw(model.parameters())
        step = gradweave.compile(model, loss_fn, optimizer, lower=lower) if lower else None
        for number, (x, y) in enumerate(batches(6)):
            if number in (0, 3):
                for p in model.parameters():
                    p.grad = torch.full_like(p, 0.01)
            if step:
                step(x, y)
                continue
            loss_fn(model, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())
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


def halve(p):
    p.grad.mul_(0.5)


def replaced_step(model, optimizer):
    step = optimizer.step
    optimizer.step = lambda: (model[0].weight.grad.mul_(0.0), step())[1]


def forward_hook(model, optimizer):
    return model[0].register_forward_hook(lambda module, args, out: out * 0.5)


def forward_pre_hook(model, optimizer):
    return model[0].register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))


def backward_hook(model, optimizer):
    return model[3].register_full_backward_hook(lambda module, given, out: (given[0] * -1,))


def backward_pre_hook(model, optimizer):
    return model[3].register_full_backward_pre_hook(lambda module, out: (out[0] * -1,))


def hook_on_all_modules(model, optimizer):
    return nn.modules.module.register_module_forward_hook(lambda module, args, out: out * 0.9)


def gradient_hook(model, optimizer):
    return model[0].weight.register_hook(lambda grad: grad * 0.5)


def accumulate_hook(model, optimizer):
    return model[0].weight.register_post_accumulate_grad_hook(halve)


def step_hook(model, optimizer):
    return optimizer.register_step_pre_hook(lambda *_: halve(model[0].weight))


def step_hook_on_all(model, optimizer):
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    return register_optimizer_step_pre_hook(lambda *_: halve(model[0].weight))


def other_module(model, optimizer):
    model[1] = nn.Tanh()


def other_forward(model, optimizer):
    model[1].forward = torch.tanh


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def parametrized(model, optimizer):
    parametrize.register_parametrization(model[0], "weight", Doubled())


@pytest.mark.parametrize(
    "change",
    [
        forward_hook, forward_pre_hook, backward_hook, backward_pre_hook, hook_on_all_modules, gradient_hook,
        accumulate_hook, step_hook, step_hook_on_all, other_module, other_forward, parametrized, replaced_step,
    ],
)  # fmt: skip
def test_what_is_put_on_or_replaced_later_takes_effect_and_so_does_its_removal(change):
    def run(lower):
        handles = []

        def each(number, model, optimizer):
            if number == 3:
                handles.append(change(model, optimizer))
            if number == 5 and hasattr(handles[0], "remove"):
                handles[0].remove()

        made = train("mlp", lower, adamw, steps=8, each=each)
        if hasattr(handles[0], "remove"):
            handles[0].remove()
        return made

    made, expected = run("replay"), run(None)
    assert torch.equal(made[2], expected[2])
    for mine, theirs in zip(made[0].parameters(), expected[0].parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_class_that_is_patched_later(monkeypatch):
    def run(lower):
        with monkeypatch.context() as patch:

            def each(number, model, optimizer):
                if number == 3:
                    patch.setattr(nn.GELU, "forward", lambda self, x: torch.tanh(x))

            return train("mlp", lower, each=each)

    assert_identical(run("replay"), run(None))


def test_a_batch_that_was_marked_dynamic_is_a_graph_like_any_other():
    """As torch marks what it has compiled for many sizes."""
    model = make("mlp")
    step = gradweave.compile(model, loss_fn, adamw(model.parameters()), lower="replay")
    for x, y in batches(4):
        torch._dynamo.maybe_mark_dynamic(x, 0)
        step(x, y)
    assert step.eager_reason is None


def test_a_batch_that_comes_to_be_a_view_of_a_weight():
    """Updates that run early would change it before it has been read for the last time."""

    def trained(compiled):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 5))
        optimizer = adamw(model.parameters())
        step = gradweave.compile(model, loss_fn, optimizer, lower="replay") if compiled else None
        generator = torch.Generator().manual_seed(2)
        for number in range(8):
            x = model[2].weight.detach() if 4 < number < 7 else torch.randn(6, 6, generator=generator)
            y = torch.randint(0, 5, (6,), generator=generator)
            if compiled:
                step(x, y)
            else:
                loss_fn(model, x, y).backward()
                optimizer.step()
                optimizer.zero_grad()
        return list(model.parameters())

    assert all(torch.equal(one, other) for one, other in zip(trained(True), trained(False), strict=True))
