import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn, optim

import gradweave
from gradweave.profile.recorded import UnseenError, record_operations
from gradweave.schedule.tasks import Kind
from step_graph.models import MODELS, Called, Checkpointed, square

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[
        pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    ]),
]  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_layers_and_tasks_are_those_of_the_traced_step(name, device):
    make, loss_fn, x = MODELS[name]
    model, x = make().to(device), x.to(device)
    params = [p for p in model.parameters() if p.requires_grad]
    noted, traced = Called(), Called()
    operations = record_operations(model, loss_fn, params, (x,))
    operations.run(noted)
    step = gradweave.compile(model, loss_fn, optim.SGD(params, lr=0.0), lower="replay")
    step(x)
    step.record(traced)
    step(x)
    assert operations.layers == step.recorded_layers
    assert noted.work() == traced.work()
    assert {kind for kind, _, _ in noted.work()} == {Kind.F, Kind.X, Kind.W}
    assert all(kind is not Kind.U for kind, _, _ in noted.of)


def test_what_is_recomputed_is_backward():
    model, x = Checkpointed(), torch.randn(3, 8)
    called = Called()
    record_operations(model, square, list(model.parameters()), (x,)).run(called)
    again = [kind for (kind, _, function), _ in called.of.items() if function == "aten.relu.default"]
    assert sorted(again, key=str) == [Kind.F, Kind.X]


def test_recording_keeps_nothing_alive():
    model, x = nn.Linear(8, 8), torch.randn(3, 8)
    lived = []

    def loss_fn(model, x):
        passing = x + 1
        seen = weakref.ref(passing)
        x = x * passing
        del passing
        lived.append(seen() is not None)
        return square(model, x)

    record_operations(model, loss_fn, list(model.parameters()), (x,)).run(lambda *_: nullcontext())
    assert lived == [False]


class Masked(nn.Linear):
    def forward(self, x):
        x = super().forward(x)
        return x[x.sum(1) > -100]


class Sliced(nn.Linear):
    def forward(self, x):
        out = torch.zeros(len(x), 2 * self.out_features)
        out[:, : self.out_features] = super().forward(x)
        return out


class _OutsideTorch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = torch.empty_like(x)
        out.numpy()[...] = 2 * x.numpy()
        return out

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class Beside(nn.Linear):
    """What it does outside of torch is on a branch: all gradients would be there without it."""

    def forward(self, x):
        x = super().forward(x)
        return x + _OutsideTorch.apply(x)


class _BackwardOutsideTorch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        out = torch.zeros(grad.shape)
        out.numpy()[...] = 2 * grad.numpy()
        return out


class Behind(nn.Linear):
    """What it does outside of torch is between the loss and the gradients."""

    def forward(self, x):
        return _BackwardOutsideTorch.apply(super().forward(x))


@pytest.mark.parametrize("kind", [Masked, Sliced, Beside, Behind])
def test_what_cannot_be_seen_is_refused(kind):
    model = kind(8, 8)
    with pytest.raises(UnseenError):
        record_operations(model, square, list(model.parameters()), (torch.randn(3, 8),))


def test_a_value_that_python_reads_is_not_read_again():
    model = nn.Linear(8, 8)
    called = Called()

    def loss_fn(model, x):
        loss = square(model, x)
        return loss if loss.item() < 1e9 else 2 * loss

    record_operations(model, loss_fn, list(model.parameters()), (torch.randn(3, 8),)).run(called)
    assert not any("scalar" in function for _, _, function in called.of)
