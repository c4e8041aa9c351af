"""On a GPU: the step as one CUDA graph."""

import copy

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

import gradweave
from compiler.models import MODELS, batches, loss_fn, make
from gradweave.compiler.cuda_graph import Captured

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def run(name, compiled, each=None, steps=10, optimizer=None, loss=loss_fn, on_cpu=True, max_norm=None):
    model = make(name).cuda()
    optimizer = (optimizer or (lambda p: optim.AdamW(p, lr=1e-2)))(model.parameters())
    step = gradweave.compile(model, loss, optimizer, max_grad_norm=max_norm) if compiled else None
    losses = []
    for number, batch in enumerate(batches(steps)):
        if each:
            each(number, model, optimizer)
        batch = [x if on_cpu and compiled else x.cuda() for x in batch]
        if step:
            losses.append(step(*batch))
            continue
        value = loss(model, *batch)
        value.backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.detach())
    return model, optimizer, torch.stack(losses).cpu()


@pytest.mark.parametrize("name", [name for name in MODELS if "dropout" not in name])
def test_losses_are_those_of_the_eager_step(name):
    made, expected = run(name, True), run(name, False)
    torch.testing.assert_close(made[2], expected[2], rtol=2e-5, atol=0)
    steps = [state["step"] for state in made[1].state_dict()["state"].values()]
    assert all(float(count) == 10 for count in steps)


def between_steps(number, model, optimizer):
    optimizer.param_groups[0]["lr"] = 1e-2 / (1 + number)
    if number == 5:
        with torch.no_grad():
            model[0].weight.mul_(0.5)
    if number == 6:
        model[0].weight.data = model[0].weight.data.clone() * 0.9
    if number == 7:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    if number == 8:
        model.load_state_dict({key: 0.9 * value for key, value in model.state_dict().items()})


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_what_is_done_between_steps_takes_effect(max_norm):
    made, expected = (run("mlp", compiled, between_steps, max_norm=max_norm) for compiled in (True, False))
    torch.testing.assert_close(made[2], expected[2], rtol=2e-5, atol=0)


@pytest.mark.parametrize("name", ["sgd", "fused", "capturable"])
def test_forms_of_optimizers(name):
    optimizer = {
        "sgd": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
        "fused": lambda p: optim.AdamW(p, lr=1e-2, fused=True),
        "capturable": lambda p: optim.Adam(p, lr=1e-2, capturable=True),
    }[name]
    made, expected = (run("mlp", compiled, optimizer=optimizer, on_cpu=False) for compiled in (True, False))
    torch.testing.assert_close(made[2], expected[2], rtol=2e-5, atol=0)


def test_half_precision_and_accumulation():
    def half(model, x, y):
        with torch.autocast("cuda", torch.bfloat16):
            out = model(x)
        return F.cross_entropy(out.float(), y)

    def train(compiled):
        model = make("mlp").cuda()
        optimizer = optim.AdamW(model.parameters(), lr=1e-2)
        step = gradweave.compile(model, half, optimizer) if compiled else None
        losses = []
        for number, (x, y) in enumerate(batches(16)):
            x, y = x.cuda(), y.cuda()
            last = number % 2 == 1
            if step and not last:
                with step.no_update():
                    losses.append(step(x, y))
            elif step:
                losses.append(step(x, y))
            else:
                losses.append(half(model, x, y))
                losses[-1].backward()
                if last:
                    optimizer.step()
                    optimizer.zero_grad()
        return torch.stack(losses).detach()

    torch.testing.assert_close(train(True), train(False), rtol=1e-2, atol=0)


def test_dropout_is_fresh_in_every_replay_and_follows_the_seed():
    def losses(seed):
        model = make("dropout").cuda()
        step = gradweave.compile(model, loss_fn, optim.SGD(model.parameters(), lr=1e-9))
        x, y = (part.cuda() for part in next(batches(1)))
        torch.manual_seed(seed)
        return torch.stack([step(x, y) for _ in range(8)])

    first = losses(3)
    assert len(first.unique()) == 8
    assert torch.equal(first, losses(3))
    assert not torch.equal(first[1:], losses(4)[1:])


class Running(nn.Module):
    """Replaces a buffer in every forward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(48, 5)
        self.register_buffer("mean", torch.zeros(48))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.inner(x - self.mean)


def test_a_buffer_that_is_replaced_is_not_captured_again_each_time(monkeypatch):
    captures = []
    capture = Captured._capture
    monkeypatch.setattr(Captured, "_capture", lambda self, inputs: (captures.append(None), capture(self, inputs)))

    def train(compiled):
        model = Running().cuda()
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        step = gradweave.compile(model, loss_fn, optimizer) if compiled else None
        losses = []
        for x, y in batches(10):
            x, y = x.cuda(), y.cuda()
            if step:
                losses.append(step(x, y))
                continue
            losses.append(loss_fn(model, x, y))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.stack(losses).detach()

    torch.testing.assert_close(train(True), train(False), rtol=2e-5, atol=0)
    assert 1 <= len(captures) <= 2
