"""Models, batches and optimizers for tests of DataParallel."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from gradweave.compare.models import GPT


class Tied(nn.Module):
    """A weight that is used twice, one that is frozen, one that is never used, a buffer."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1 + dist.get_rank()
        return self.head(self.frozen(self.body(self.embedding(x))))


def make(kind):
    torch.manual_seed(0)
    if kind == "mlp":
        return nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(12, 12), nn.Tanh())), nn.Linear(12, 5))
    if kind == "conv":
        return nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.BatchNorm2d(8),
            nn.ReLU(), nn.Conv2d(8, 12, 1, groups=4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 5),
        )  # fmt: skip
    if kind == "gpt":
        return GPT(vocabulary=17, width=8, blocks=2, heads=2, tokens=6)
    return Tied()


def batch(kind, step, rank):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    if kind == "mlp":
        return torch.randn(6, 12, generator=generator), torch.randint(0, 5, (6,), generator=generator)
    if kind == "conv":
        return torch.randn(6, 3, 9, 9, generator=generator), torch.randint(0, 5, (6,), generator=generator)
    words = 17 if kind == "gpt" else 11
    tokens = torch.randint(0, words, (3, 7), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def optimizer_of(params, name):
    if name == "adamw":
        return torch.optim.AdamW(params, lr=0.01)
    if name == "fused":
        return torch.optim.AdamW(params, lr=0.01, fused=True)
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def loss_of(model, kind, step, rank):
    x, y = batch(kind, step, rank)
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


def weights(model):
    return torch.cat([p.detach().flatten().double() for p in model.parameters()])
