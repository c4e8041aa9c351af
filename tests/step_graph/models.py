"""Models, and a count of operations by task, that several tests of measured operations use."""

from collections import Counter
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gradweave._compat.dispatch import EveryCall
from gradweave.compare.models import GPT, MobileNetV2, ResNet18
from gradweave.schedule.tasks import Kind


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
