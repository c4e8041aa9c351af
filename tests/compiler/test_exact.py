"""A replayed step has the operations of the eager one, where torch's compilers would have others: the same bits."""

from fractions import Fraction

import pytest
import torch
from torch import optim
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from compiler.models import assert_identical, train


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


RATES = {
    "float32": torch.tensor,
    "float64": lambda x: torch.tensor(x, dtype=torch.float64),
    "1": lambda x: torch.tensor([x]),
}


@pytest.mark.parametrize("optimizer", [optim.SGD, optim.AdamW, optim.NAdam, optim.Adamax])
@pytest.mark.parametrize("kind", RATES)
def test_rates_that_are_tensors(optimizer, kind, warned):
    """They compute in a precision of their own, and may be changed in place."""

    def run(lower):
        rate = RATES[kind](0.01)

        def each(number, model, optimizer):
            rate.fill_(0.01 / (1 + number))

        return train("linear", lower, lambda p: optimizer(p, lr=rate), each=each)

    assert_identical(run("replay"), run(None))
    assert not warned()


@pytest.mark.parametrize("optimizer", [optim.AdamW, optim.NAdam])
def test_numbers_that_have_a_precision_of_their_own_are_left_to_the_eager_step(optimizer, warned):
    numpy = pytest.importorskip("numpy")

    def each(number, model, optimizer):
        kind = (float, float, numpy.float64, numpy.float32, numpy.float16, Fraction)[number]
        optimizer.param_groups[0]["lr"] = kind(0.01)

    assert_identical(*(train("linear", lower, optimizer, each=each) for lower in ("replay", None)))
    (message,) = warned()
    assert "its lr is a numpy.float32" in message
    assert "give a float" in message
