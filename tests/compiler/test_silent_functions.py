"""What a forward tells its user is left out of a graph, and does not keep it from being one."""

import logging
import warnings
from functools import partial

import pytest
import torch
from torch import nn

import gradweave
from compiler.models import assert_identical, batches, both, loss_fn

LOGGER = logging.getLogger("a model")


class Talking(nn.Module):
    """Tells its user something in every forward."""

    def __init__(self, tell):
        super().__init__()
        self.inner, self.tell, self.calls = nn.Linear(48, 5), tell, 0

    def forward(self, x):
        self.calls += 1
        out = self.inner(x)
        self.tell(out)
        return out


WAYS = {
    "a logger": lambda out: LOGGER.warning("is called on %s", out.shape),
    "a logger, of a value": lambda out: LOGGER.info(f"is called on {out.mean()}"),
    "a logger, by level": lambda out: LOGGER.log(logging.WARNING, "is called"),
    "a logger, by its old name": lambda out: LOGGER.warn("is called"),
    "logging": lambda out: logging.warning("is called"),
    "warnings": lambda out: warnings.warn("is called", stacklevel=2),
    "print": lambda out: print("is called on", out.shape),
    "print, to a file, of a value": lambda out: print(f"{out.mean()}", file=None, flush=True),
    "print, of a number": lambda out: print(out.sum().item(), "is called"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WAYS)
def test_what_a_model_tells_does_not_keep_it_from_being_compiled(name, warned):
    made, expected, step = both(partial(Talking, WAYS[name]), loss_fn, list(batches(4)))
    assert_identical(made, expected)
    assert made[0].calls == expected[0].calls == 4
    assert step.eager_reason is None
    assert not warned()


@pytest.mark.parametrize("lower", ["replay", "inductor"])
def test_only_eager_steps_tell(lower, capsys, caplog, recwarn):
    """The first step is one; to make a graph tells nothing either."""

    def tell(out):
        print("printed")
        LOGGER.warning("logged")
        warnings.warn("warned", stacklevel=1)

    def told():
        records = [record for record in caplog.records if record.name == LOGGER.name]
        shown = [each for each in recwarn.list if str(each.message) == "warned"]
        recwarn.clear()
        caplog.clear()
        return capsys.readouterr().out.count("printed"), len(records), len(shown)

    warnings.simplefilter("always")
    model = Talking(tell)
    step = gradweave.compile(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), lower=lower)
    counts = []
    for x, y in batches(4):
        step(x, y)
        counts.append(told())
    assert counts == [(1, 1, 1), *[(0, 0, 0)] * 3]


class Noted(logging.Logger):
    """A logger with a method of its own, which returns a value."""

    def is_on(self):
        return self.level == logging.CRITICAL


def test_a_logger_whose_answer_is_used_is_asked(warned):
    logger = Noted("asked")

    def objective(model, x, y):
        return loss_fn(model, x, y) * (2 if logger.is_on() else 1)

    data = list(batches(6))
    torch.manual_seed(0)
    model = nn.Linear(48, 5)
    step = gradweave.compile(model, objective, torch.optim.SGD(model.parameters(), lr=0.0), lower="replay")
    x, y = data[0]
    losses = [step(x, y)]
    losses.append(step(x, y))
    logger.setLevel(logging.CRITICAL)
    losses.append(step(x, y))
    assert torch.equal(losses[1], losses[0])
    assert torch.equal(losses[2], 2 * losses[0])
    assert len(warned()) <= 1
