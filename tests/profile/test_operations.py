import weakref
from collections import Counter
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import gradweave
from gradweave._compat.dispatch import EveryCall, EveryResult
from gradweave.compare.models import GPT, MobileNetV2, ResNet18
from gradweave.errors import GradweaveError
from gradweave.profile.operations import UnseenError, differentiate, record_operations
from gradweave.schedule.tasks import Kind

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[
        pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    ]),
]  # fmt: skip


class Called:
    """Counts operations by task."""

    def __init__(self):
        self.of = Counter()

    @contextmanager
    def __call__(self, kind, layer):
        with EveryCall(lambda function, *_: self.of.update([(kind, layer, str(function))])):
            yield

    def work(self):
        """Without updates, and only what has other operations neither when it is traced nor on other devices."""
        return Counter({
            task: n for task, n in self.of.items()
            if task[0] is not Kind.U and any(name in task[2] for name in ("mm", "convolution", "embedding", "relu"))
        })  # fmt: skip


class Detached(nn.Module):
    """One of its layers is read, and has no gradient; another is not even read."""

    def __init__(self):
        super().__init__()
        self.first, self.read, self.unread, self.last = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        x = F.relu(self.first(x))
        return self.last(x + self.read(x).detach())


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.third(checkpoint(lambda x: self.second(F.relu(self.first(x))), x, use_reentrant=False))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.attention, self.head = nn.Embedding(20, 8), nn.MultiheadAttention(8, 2), nn.Linear(8, 20)
        self.head.weight = self.table.weight

    def forward(self, x):
        x = self.table(x)
        return self.head(self.attention(x, x, x)[0])


def square(model, x):
    return model(x).square().mean()


def in_bfloat16(model, x):
    with torch.autocast(x.device.type, torch.bfloat16):
        return square(model, x).float()


def tokens(*shape):
    return torch.randint(0, 20, shape)


def mlp():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Dropout(0.1), nn.LayerNorm(8), nn.Linear(8, 4))


MODELS = {
    "mlp": (mlp, square, torch.randn(3, 8)),
    "bfloat16": (mlp, in_bfloat16, torch.randn(3, 8)),
    "frozen": (lambda: nn.Sequential(nn.Linear(8, 8).requires_grad_(False), *mlp()), square, torch.randn(3, 8)),
    "detached": (Detached, square, torch.randn(3, 8)),
    "tied": (Tied, square, tokens(3, 4)),
    "gpt": (lambda: GPT(vocabulary=20, width=16, blocks=2, heads=2, tokens=8), square, tokens(2, 8)),
    "mobilenet": (MobileNetV2, square, torch.randn(2, 3, 32, 32)),
    "resnet": (ResNet18, square, torch.randn(2, 3, 32, 32)),
}


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


def test_what_is_computed_anew_is_backward():
    model, x = Checkpointed(), torch.randn(3, 8)
    called = Called()
    record_operations(model, square, list(model.parameters()), (x,)).run(called)
    again = [kind for (kind, _, function), _ in called.of.items() if function == "aten.relu.default"]
    assert sorted(again, key=str) == [Kind.F, Kind.X]


def test_what_is_done_again_has_the_same_result():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)), torch.randn(3, 8)
    params = list(model.parameters())
    _, expected = differentiate(model, square, params, (x,))
    operations = record_operations(model, square, params, (x,))
    products = {}

    @contextmanager
    def note(kind, layer):
        with EveryResult(lambda function, _, __, result: products.update({(kind, layer, str(function)): result})):
            yield

    operations.run(note)
    for layer, weight in enumerate((params[0], params[2])):
        assert torch.equal(products[Kind.W, layer, "aten.mm.default"], expected[weight])


def test_noting_keeps_nothing_alive():
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


@pytest.mark.parametrize("trained", [True, False])
def test_a_loss_without_parameters(trained):
    model, other = nn.Linear(8, 8), nn.Linear(8, 8)
    with pytest.raises(GradweaveError, match="no parameter"):
        differentiate(model.requires_grad_(trained), square, list(other.parameters()), (torch.randn(3, 8),))


def test_autocast_around_it_casts_once():
    """Also what is kept out of it."""
    model, x = mlp(), torch.randn(3, 8)
    inside, outside = Called(), Called()

    def partly(model, x):
        with torch.autocast("cpu", enabled=False):
            x = model[:-1](x)
        return square(model[-1], x)

    with torch.autocast("cpu", torch.bfloat16):
        operations = record_operations(model, partly, list(model.parameters()), (x,))
        operations.run(inside)
    operations.run(outside)
    assert inside.of == outside.of
