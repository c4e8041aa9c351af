"""Updates in the next forward: the same training, bit for bit, and the step decided at ``step()``."""

import pytest
import torch
from torch import nn, optim

from gradweave._runtime import buckets
from gradweave.errors import UnsupportedError
from gradweave.fusion import fuse
from gradweave.optim import Eva, EvaF, EvaS
from optim.models import images, loss_of, make_conv, make_mlp, rows, weights

ALL = [Eva, EvaF, EvaS]


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch):
    monkeypatch.setattr(buckets, "CPU_BUCKET_BYTES", {"forward": 1, "backward": 1})


def train(cls, *, fused, make=make_mlp, data=rows, count=6, change=lambda number, model, optimizer: None, **options):
    torch.manual_seed(0)
    model = make()
    optimizer = cls(model, **options)
    seen = []
    if fused:
        fusion = fuse(model, optimizer, "forward")
        fusion.record(lambda bucket: _Note(seen, bucket))
    losses = []
    for number, x in enumerate(data(count)):
        loss = loss_of(model, x)
        loss.backward()
        change(number, model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        seen.append("step")
        losses.append(loss.detach())
    if fused:
        fusion.flush()
        assert any(isinstance(one, int) for one in seen)
    return model, optimizer, torch.stack(losses), seen


class _Note:
    def __init__(self, seen, bucket):
        self.seen, self.bucket = seen, bucket

    def __enter__(self):
        self.seen.append(self.bucket)

    def __exit__(self, *_):
        pass


def check_same(one, other):
    assert torch.equal(weights(one[0]), weights(other[0]))
    assert torch.equal(one[2], other[2])
    for p, q in zip(one[0].parameters(), other[0].parameters(), strict=True):
        mine, theirs = one[1].state[p], other[1].state[q]
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(theirs[key])), key


@pytest.mark.parametrize("cls", ALL)
@pytest.mark.parametrize(("make", "data"), [(make_mlp, rows), (make_conv, images)])
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1, "maximize": True}])
def test_it_trains_as_in_stock_order(cls, make, data, options):
    made, expected = (train(cls, fused=fused, make=make, data=data, **options) for fused in (True, False))
    check_same(made, expected)


def test_updates_come_in_the_next_forward():
    *_, seen = train(EvaF, fused=True)
    after = seen[seen.index("step") + 1 :]
    first, second = after.index("step"), len(after)
    assert all(isinstance(one, int) for one in after[first + 1 : after.index("step", first + 1)])
    assert second > first
    assert len({one for one in seen if isinstance(one, int)}) > 1


@pytest.mark.parametrize("cls", [Eva, EvaF, EvaS])
def test_a_step_with_a_gradient_that_is_not_finite_changes_nothing(cls):
    def spoil(number, model, _):
        if number == 3:
            next(model.parameters()).grad.view(-1)[0] = float("nan")

    made, expected = (train(cls, fused=fused, change=spoil) for fused in (True, False))
    check_same(made, expected)
    assert torch.isfinite(weights(made[0])).all()


def test_a_learning_rate_that_changes_behind_step():
    def warm(number, model, optimizer):
        for group in optimizer.param_groups:
            group["lr"].mul_(0.9)

    made, expected = (train(EvaF, fused=fused, change=warm, lr=torch.tensor(0.1)) for fused in (True, False))
    check_same(made, expected)


def test_with_a_scheduler_and_a_scaled_loss():
    def run(fused):
        torch.manual_seed(0)
        model = make_mlp()
        optimizer = EvaF(model)
        fusion = fuse(model, optimizer, "forward") if fused else None
        schedule = optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for x in rows(6):
            scaler.scale(loss_of(model, x)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            schedule.step()
        if fusion is not None:
            fusion.detach()
        return weights(model)

    assert torch.equal(run(True), run(False))


def test_a_state_dict_between_steps_and_detaching():
    def run(fused):
        torch.manual_seed(0)
        model = make_mlp()
        optimizer = Eva(model)
        fusion = fuse(model, optimizer, "forward") if fused else None
        for number, x in enumerate(rows(6)):
            loss_of(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == 3:
                saved = optimizer.state_dict()
                optimizer.load_state_dict(saved)
            if number == 4 and fusion is not None:
                fusion.detach()
        return weights(model)

    assert torch.equal(run(True), run(False))


def test_a_layer_that_is_not_used():
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 4)
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return self.two(x if self.calls % 3 == 0 else self.one(x))

    def data(count):
        generator = torch.Generator().manual_seed(0)
        return [torch.randn(8, 6, generator=generator) for _ in range(count)]

    made, expected = (train(EvaF, fused=fused, make=Sometimes, data=data) for fused in (True, False))
    check_same(made, expected)


def test_a_step_of_its_own_is_not_passed_over():
    class Clipped(EvaF):
        def step(self, closure=None):
            nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
            return super().step(closure)

    model = make_mlp()
    with pytest.raises(UnsupportedError, match=r"^Clipped: .*train without fuse"):
        fuse(model, Clipped(model), "forward")


def test_parameters_of_a_class_of_their_own_are_updated_in_stock_order():
    class Own(nn.Parameter):
        pass

    def make():
        model = make_mlp()
        model[0].weight = Own(model[0].weight.detach().clone())
        return model

    def run(fused):
        model = make()
        optimizer = EvaF(model)
        if fused:
            fuse(model, optimizer, "forward")
        for x in rows(5):
            loss_of(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)

    assert torch.equal(run(True), run(False))
