"""Small models with everything that a pipeline has to get right, and training without one."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gradweave.compare.models.gpt import _Block as Block

WIDTH, VOCABULARY, TOKENS = 8, 11, 5


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.randn(TOKENS, WIDTH))

    def forward(self, tokens):
        return self.tokens(tokens) + self.position


class Head(nn.Module):
    def __init__(self, weight=None):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if weight is not None:
            self.out.weight = weight

    def forward(self, x):
        return self.out(self.norm(x))


def gpt(blocks=6, tied=False):
    embedding = Embedding()
    head = Head(embedding.tokens.weight if tied else None)
    return nn.Sequential(embedding, *(Block(WIDTH, 2) for _ in range(blocks)), head)


def mlp(layers=8):
    """Linear layers with and without bias, norms, a frozen layer, and buffers."""
    torch_layers = []
    for i in range(layers):
        linear = nn.Linear(6, 6, bias=i % 2 == 0)
        torch_layers.append(nn.Sequential(linear, nn.BatchNorm1d(6) if i % 3 == 0 else nn.Tanh()))
    torch_layers[2].requires_grad_(False)
    return nn.Sequential(*torch_layers)


def convolutions():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1, groups=2), nn.BatchNorm2d(4),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()), nn.Linear(4, 5),
    )  # fmt: skip


class Pair(nn.Module):
    """Hands two tensors on."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, given):
        x, y = given if isinstance(given, tuple) else (given, given)
        return self.linear(x) + y, y * 0.5


class Close(nn.Module):
    def forward(self, given):
        return given[0] + given[1]


def pairs():
    return nn.Sequential(Pair(), Pair(), Pair(), Close())


class Both(nn.Module):
    """Hands two tensors on, each of a layer of its own."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(6, 6)
        self.other = nn.Linear(6, 6)

    def forward(self, x):
        return self.one(x), self.other(x)


class First(nn.Module):
    def forward(self, given):
        return given[0]


def unused():
    """The second tensor that the second layer hands on is not used."""
    return nn.Sequential(nn.Linear(6, 6), Both(), First(), nn.Linear(6, 6))


class Holder(nn.Module):
    """A layer with a weight that others may have, too, and that it may leave alone."""

    def __init__(self, shared, *, used=True):
        super().__init__()
        self.shared = shared
        self.own = nn.Linear(6, 6)
        self.used = used

    def forward(self, x):
        return self.own(self.shared(x).tanh() if self.used else x)


def tied_in_a_ring():
    """Of three ranks, each two share a weight."""
    a, b, c = (nn.Linear(6, 6) for _ in range(3))
    return nn.Sequential(*(Holder(shared) for shared in (a, b, a, c, b, c)))


def tied_unused():
    """Two ranks share a weight that none of them uses, and one that only the second one uses."""
    a, b = nn.Linear(6, 6), nn.Linear(6, 6)
    layers = Holder(a, used=False), Holder(b, used=False), Holder(a, used=False), Holder(b)
    return nn.Sequential(*layers)


class Recomputed(Block):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def recomputed():
    return nn.Sequential(Embedding(), *(Recomputed(WIDTH, 2) for _ in range(4)), Head())


MODELS = {
    "recomputed": recomputed,
    "gpt": gpt,
    "tied": lambda: gpt(tied=True),
    "mlp": mlp,
    "convolutions": convolutions,
    "pairs": pairs,
    "linears": lambda: nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))),
    "unused": unused,
    "tied_in_a_ring": tied_in_a_ring,
    "tied_unused": tied_unused,
}


def make(name, seed=0):
    torch.manual_seed(seed)
    return MODELS[name]()


def batch(name, size=8, seed=1):
    generator = torch.Generator().manual_seed(seed)
    if name in ("gpt", "tied", "recomputed"):
        tokens = torch.randint(VOCABULARY, (size, TOKENS + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:].clone()
    if name == "convolutions":
        return torch.randn(size, 3, 6, 6, generator=generator), torch.randint(5, (size,), generator=generator)
    return torch.randn(size, 6, generator=generator), torch.randn(size, 6, generator=generator)


def loss_fn(output, target):
    if target.dtype is torch.int64:
        return functional.cross_entropy(output.flatten(0, -2), target.flatten())
    return functional.mse_loss(output, target)


def stock_step(model, name, microbatches, *, seed=1, factor=1.0):
    """Forward and backward of a batch, micro-batch by micro-batch, without a pipeline; gives the mean loss."""
    x, target = batch(name, seed=seed)
    losses = []
    for x_part, target_part in zip(x.chunk(microbatches), target.chunk(microbatches), strict=True):
        loss = loss_fn(model(x_part), target_part)
        losses.append(loss.detach())
        ((loss * factor if factor != 1.0 else loss) / microbatches).backward()
    return torch.stack(losses).mean()
