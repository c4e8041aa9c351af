import pytest
import torch
from torch import nn

from gradweave._runtime.wrapped_optimizers import without_wrapper


class Lookahead(torch.optim.Optimizer):
    """A wrapper with an update of its own."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        super().__init__([p for group in optimizer.param_groups for p in group["params"]], {})


def adam():
    return torch.optim.Adam(nn.Linear(2, 2).parameters())


def test_what_accelerate_prepares_holds_the_optimizer():
    import accelerate

    optimizer = adam()
    assert without_wrapper(accelerate.Accelerator(cpu=True).prepare(optimizer)) is optimizer


def test_what_lightning_hands_out_holds_the_optimizer():
    from lightning.pytorch.core import optimizer as wrappers

    optimizer = adam()
    assert without_wrapper(wrappers.LightningOptimizer(optimizer)) is optimizer


@pytest.mark.parametrize("given", [adam(), Lookahead(adam()), "adam", None])
def test_anything_else_stays_as_it_is(given):
    assert without_wrapper(given) is given
