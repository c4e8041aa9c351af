import random

import numpy
import pytest
import torch
from torch import optim

import gradweave
from compiler.models import assert_identical, batches, loss_fn, make, train
from gradweave.compiler.random_numbers import (
    generator_states,
    preserve_generators,
    refuse_python_random,
    restore_generators,
)
from gradweave.step_graph.errors import NotOneGraphError


def test_dropout_is_fresh_in_every_step_and_follows_the_seed():
    def losses(seed):
        model = make("dropout")
        step = gradweave.compile(model, loss_fn, optim.SGD(model.parameters(), lr=1e-9), lower="inductor")
        x, y = next(batches(1))
        torch.manual_seed(seed)
        return torch.stack([step(x, y) for _ in range(5)])

    first = losses(3)
    assert len(first.unique()) == 5
    assert torch.equal(first, losses(3))
    assert not torch.equal(first[1:], losses(4)[1:])


OWN = random.Random(3)


GENERATOR = numpy.random.default_rng(3)


DRAWS = {
    "random": random.random,
    "randint": lambda: random.randint(1, 5),
    "choice": lambda: random.choice([1.0, 2.0]),
    "a generator of Python's": OWN.random,
    "numpy": lambda: float(numpy.random.rand()),
    "a generator of numpy's": GENERATOR.random,
}


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("where", ["loss", "optimizer"])
def test_numbers_of_python_and_numpy_are_fresh_and_their_own(draw, where, warned):
    class Drawing(optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(p.grad, alpha=group["lr"] * DRAWS[draw]())

    def drawing(model, x, y):
        return loss_fn(model, x, y) * DRAWS[draw]()

    def run(lower):
        random.seed(1)
        numpy.random.seed(1)
        OWN.seed(1)
        GENERATOR.bit_generator.state = numpy.random.default_rng(1).bit_generator.state
        if where == "loss":
            return train("mlp", lower, loss=drawing)
        return train("mlp", lower, lambda p: Drawing(p, lr=0.1))

    assert_identical(run("replay"), run(None))
    assert len(warned()) == 1


@pytest.mark.parametrize("draw", [random.random, numpy.random.rand])
def test_a_refused_draw_is_undone(draw):
    python, of_numpy = random.getstate(), numpy.random.get_state()[1].copy()
    with pytest.raises(NotOneGraphError, match="random"), refuse_python_random():
        draw()
    assert random.getstate() == python
    assert (numpy.random.get_state()[1] == of_numpy).all()


def test_torchs_generators_are_not_refused_and_can_be_reset():
    device = torch.device("cpu")
    states = generator_states(device)
    with refuse_python_random():
        drawn = torch.rand(3)
    restore_generators(device, states)
    with preserve_generators(device):
        assert torch.equal(torch.rand(3), drawn)
    assert torch.equal(torch.rand(3), drawn)
