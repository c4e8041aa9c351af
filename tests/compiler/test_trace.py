"""What is traced: every optimizer, and the operations of the eager step where torch's compilers have others."""

import pytest
import torch
from torch import optim
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from compiler.models import CAPTURABLE_FORM, OPTIMIZERS, assert_identical, train


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_replay_of_every_optimizer_is_the_eager_step_bit_for_bit(name):
    assert_identical(train("mlp", "replay", OPTIMIZERS[name]), train("mlp", None, OPTIMIZERS[name]))


@pytest.mark.parametrize("name", CAPTURABLE_FORM)
def test_optimizers_whose_eager_step_branches_on_a_count(name):
    made, expected = (train("mlp", lower, CAPTURABLE_FORM[name], steps=9) for lower in ("replay", None))
    torch.testing.assert_close(made[2], expected[2], rtol=1e-5, atol=0)


class Cautious(optim.SGD):
    """Branches on the value of a gradient."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad.sum() > 0:
                    p.grad.mul_(0.5)
        return super().step(closure)


def test_an_optimizer_that_cannot_be_traced_is_named(warned):
    assert_identical(*(train("mlp", lower, lambda p: Cautious(p, lr=0.1)) for lower in ("replay", None)))
    (message,) = warned()
    assert "Cautious" in message
    assert "use another" in message


def test_a_number_that_opens_another_branch_makes_a_new_graph():
    def each(number, model, optimizer):
        optimizer.param_groups[0]["weight_decay"] = 0.0 if number < 3 else 0.1

    assert_identical(
        train("mlp", "replay", OPTIMIZERS["sgd, everything"], each=each),
        train("mlp", None, OPTIMIZERS["sgd, everything"], each=each),
    )


def test_groups_with_different_hyperparameters():
    def groups(params):
        params = list(params)
        return optim.AdamW([{"params": params[:2], "lr": 1e-3}, {"params": params[2:], "weight_decay": 0.3}], lr=1e-2)

    assert_identical(train("mlp", "replay", groups), train("mlp", None, groups))


def upsampled(mode, **options):
    def loss(model, x, y):
        image = model(x).view(1, 1, 6, 5)
        return F.interpolate(image, scale_factor=1.7, mode=mode, **options).square().mean()

    return loss


def divided(model, x, y):
    out = model(x)
    return torch.addcdiv(out, out, out.abs() + 1, value=0.3).square().mean()


def divided_in_place(model, x, y):
    out = model(x)
    return (out * 1).addcdiv_(out, out.abs() + 1, value=0.3).addcmul_(out, out, value=0.7).square().mean()


def used_twice_under_autocast(model, x, y):
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x) + model(x * 2)
    return F.cross_entropy(out.float(), y)


def used_once_under_autocast(model, x, y):
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x)
    return F.cross_entropy(out.float(), y)


def checkpointed(loss):
    return lambda *batch: checkpoint(loss, *batch, use_reentrant=False)


LOSSES = {
    "bilinear": upsampled("bilinear"),
    "bilinear, antialias": upsampled("bilinear", antialias=True),
    "bicubic": upsampled("bicubic", align_corners=True),
    "addcdiv": divided,
    "addcdiv_ and addcmul_": divided_in_place,
    "a weight that is used twice under autocast": used_twice_under_autocast,
    "dropout": lambda model, x, y: F.dropout(model(x), 0.37).square().mean(),
    "bicubic, checkpointed": checkpointed(upsampled("bicubic")),
    "autocast, checkpointed": checkpointed(used_once_under_autocast),
}


@pytest.mark.parametrize("name", LOSSES)
def test_operations_that_compilers_take_apart(name, warned):
    made, expected = (train("small", lower, loss=LOSSES[name]) for lower in ("replay", None))
    assert_identical(made, expected)
    assert not warned()


def test_casts_of_a_weight_that_is_used_twice_in_a_checkpoint_are_left_to_the_eager_step(warned):
    loss = checkpointed(used_twice_under_autocast)
    assert_identical(*(train("small", lower, loss=loss) for lower in ("replay", None)))
    (message,) = warned()
    assert "more than once under autocast" in message


class Around(optim.Optimizer):
    """Leaves the update to another optimizer."""

    def __init__(self, params):
        self.inner = optim.SGD(params, lr=0.1)
        super().__init__(self.inner.param_groups[0]["params"], {})

    def step(self, closure=None):
        return self.inner.step()


def test_an_optimizer_around_another_one_updates(warned):
    made, expected = (train("mlp", lower, Around) for lower in ("replay", None))
    assert torch.equal(made[2], expected[2])
    assert len(made[2].unique()) == len(made[2])
    assert len(warned()) == 1


def test_momentum_that_is_switched_on_later():
    def each(number, model, optimizer):
        optimizer.param_groups[0]["momentum"] = 0.9 if number > 2 else 0.0

    assert_identical(*(train("mlp", lower, lambda p: optim.SGD(p, lr=0.1), each=each) for lower in ("replay", None)))


def asks(model, x, y):
    scale = 2 if torch.compiler.is_compiling() else 1
    return F.cross_entropy(model(x), y) * scale


def checks_unless_compiled(model, x, y):
    if not torch.compiler.is_compiling() and (x < -100).any():
        raise ValueError
    return F.cross_entropy(model(x), y)


@pytest.mark.parametrize("loss", [asks, checks_unless_compiled])
def test_code_that_asks_whether_it_is_compiled_does_what_it_does_eagerly_if_that_can_be_a_graph(loss, warned):
    assert_identical(*(train("mlp", lower, loss=loss) for lower in ("replay", None)))
    assert not warned()
