"""Layers that do what layers seldom do: the gradients of the whole model, or an error. All stages on one rank."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from gradweave.errors import GradweaveError
from gradweave.parallel.pipeline import Pipeline

TWO_STAGES = {"microbatches": 2, "policy": "modulo", "group": 2}


@pytest.fixture(autouse=True)
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def layers(*odd):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), *odd, nn.Linear(6, 6))


def data():
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1)), torch.zeros(8, 6)


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def gradients_are_stock(model):
    stock = copy.deepcopy(model)
    pipe = Pipeline(model, F.mse_loss, **TWO_STAGES)
    x, y = data()
    pipe.step(x, y)
    for x_part, y_part in zip(x.chunk(2), y.chunk(2), strict=True):
        (F.mse_loss(stock(x_part), y_part) / 2).backward()
    pairs = zip(model.parameters(), stock.parameters(), strict=True)
    for p, q in pairs:
        torch.testing.assert_close(p.grad, q.grad)
    pipe.close()


def test_a_stage_that_begins_in_place():
    gradients_are_stock(layers(nn.Identity(), nn.ReLU(inplace=True)))


def test_a_stage_that_ends_out_of_order_in_memory():
    turn = Function(lambda x: x.t().contiguous().t())
    gradients_are_stock(layers(turn, nn.Identity()))


def test_a_tuple_of_one_is_refused():
    pipe = Pipeline(layers(Function(lambda x: (x,)), Function(lambda x: x)), F.mse_loss, **TWO_STAGES)
    with pytest.raises(GradweaveError, match="a tuple of one tensor"):
        pipe.step(*data())


@pytest.mark.parametrize("beside", [None, 3, True])
def test_what_is_no_tensor_is_not_handed_on(beside):
    pipe = Pipeline(layers(Function(lambda x: (x, beside)), Function(lambda given: given[0])), F.mse_loss, **TWO_STAGES)
    with pytest.raises(GradweaveError, match=f"hands on '{type(beside).__name__}', and only tensors can be sent"):
        pipe.step(*data())


def test_a_precision_that_changes_is_refused():
    pipe = Pipeline(layers(nn.Tanh(), nn.Identity()), F.mse_loss, **TWO_STAGES)
    pipe.step(*data())
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(GradweaveError, match="the same precision in all steps"):
        pipe.step(*data())


def test_stages_that_need_no_gradient_are_refused_by_torchs_split():
    model = layers(nn.Tanh(), nn.Identity())
    model[0].requires_grad_(False)
    pipe = Pipeline(model, F.mse_loss, split="torch", **TWO_STAGES)
    with pytest.raises(GradweaveError, match='use split="fast"'):
        pipe.step(*data())


class Scratch(nn.Module):
    """Keeps its result in memory that it uses again."""

    def forward(self, x):
        if not hasattr(self, "kept"):
            self.kept = torch.zeros(4, 6)
        self.kept = self.kept.detach()
        self.kept.copy_(x)
        return self.kept


def test_activations_that_are_written_over_are_an_error_not_a_wrong_number():
    model = layers(Scratch(), nn.Linear(6, 6))
    pipe = Pipeline(model, F.mse_loss, microbatches=2, policy="fast_forward")
    with pytest.raises((GradweaveError, RuntimeError), match=r"changed in place|modified by an inplace"):
        pipe.step(*data())


def test_norms_of_doubles_are_doubles():
    model = layers(nn.Tanh(), nn.Identity()).double()
    pipe = Pipeline(model, F.mse_loss, **TWO_STAGES)
    x, y = data()
    pipe.step(x.double(), y.double())
    for p in model.parameters():
        p.grad.fill_(1e150)
    assert float(pipe.clip_grad_norm_(1.0)) > 1e150
    assert all(p.grad.abs().max() > 0 for p in model.parameters())
    pipe.close()


def test_a_closed_pipeline_asks_nobody():
    pipe = Pipeline(layers(nn.Tanh(), nn.Identity()), F.mse_loss, **TWO_STAGES)
    pipe.close()
    for ask in (lambda: pipe.clip_grad_norm_(1.0), pipe.gather_state_dict, lambda: pipe.step(*data())):
        with pytest.raises(GradweaveError, match="is closed"):
            ask()
