"""Tiny models and optimizers for random loops, one for each thing that a technique may get wrong."""

import torch
from torch import nn, optim

WIDTH = 4


class Failure(Exception):
    """The error that a loop's own code raises and catches."""


class Trained(nn.Module):
    """A body, and a head that is unused at first; either can be set to fail, in forward or in backward."""

    def __init__(self, body):
        super().__init__()
        self.body = body
        self.head = nn.Linear(WIDTH, WIDTH)
        self.awake = False
        self.fails_in = ""

    def forward(self, x):
        x = self.body(x)
        if self.fails_in == "forward":
            raise Failure("forward")
        if self.fails_in == "backward":
            x.register_hook(self._fail)
        x = torch.tanh(x)
        return self.head(x) if self.awake else x

    @staticmethod
    def _fail(_):
        raise Failure("backward")


class Twice(nn.Module):
    """One layer that is used twice."""

    def __init__(self):
        super().__init__()
        self.first, self.shared = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.shared(torch.tanh(self.shared(torch.tanh(self.first(x)))))


class Tied(nn.Module):
    """Two layers that share a weight but not their bias."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.decoder.weight = self.encoder.weight

    def forward(self, x):
        return self.decoder(torch.tanh(self.encoder(x)))


class Tokens(nn.Module):
    """An embedding that shares its weight with the last layer."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.embedding((x > 0).long()).mean(1)
        return nn.functional.linear(torch.tanh(self.middle(x)), self.embedding.weight)


class Attends(nn.Module):
    """Self-attention with one weight for all input projections."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x):
        x = x.unsqueeze(0)
        return self.attention(x, x, x, need_weights=False)[0].squeeze(0)


class Convolves(nn.Module):
    """Convolutions and a batch norm."""

    def __init__(self):
        super().__init__()
        self.wide, self.norm, self.narrow = nn.Conv1d(1, 3, 3, padding=1), nn.BatchNorm1d(3), nn.Conv1d(3, 1, 1)

    def forward(self, x):
        return self.narrow(torch.relu(self.norm(self.wide(x.unsqueeze(1))))).squeeze(1)


BODIES = {
    "plain": lambda: nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, WIDTH)),
    "twice": Twice,
    "tied": Tied,
    "dropout": lambda: nn.Sequential(nn.Linear(WIDTH, 6), nn.Dropout(0.3), nn.Linear(6, WIDTH)),
    "norm": lambda: nn.Sequential(nn.Linear(WIDTH, 6), nn.BatchNorm1d(6), nn.Linear(6, WIDTH)),
    "tokens": Tokens,
    "attention": Attends,
    "convolution": Convolves,
    "spectral": lambda: nn.Sequential(nn.Linear(WIDTH, 6), nn.utils.parametrizations.weight_norm(nn.Linear(6, WIDTH))),
}


AVERAGING = frozenset(("norm", "convolution"))
"""Bodies whose forward, in training, updates running averages."""


class Lookahead(optim.SGD):
    """Counts steps in its groups; every second step moves slow weights towards the fast ones."""

    def __init__(self, params, lr):
        super().__init__(params, lr=lr, momentum=0.9)
        for group in self.param_groups:
            group["count"] = 0

    @torch.no_grad()
    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.detach().clone())
                if group["count"] % 2 == 0:
                    slow.lerp_(p, 0.5)
                    p.copy_(slow)
        return loss


class TakesNorm(optim.SGD):
    """Records the norm of all gradients before it updates."""

    norm = None

    def step(self, closure=None):
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.norm = torch.stack([g.norm() for g in gradients]).norm() if gradients else None
        return super().step(closure)


class Raises(optim.AdamW):
    """Can be set to raise in a step before it changes anything."""

    fails = False

    def step(self, closure=None):
        if self.fails:
            raise Failure("step")
        return super().step(closure)


def _of_two_groups(model):
    body, head = list(model.body.parameters()), list(model.head.parameters())
    return optim.AdamW([{"params": body}, {"params": head, "lr": 0.05, "weight_decay": 0.1}], lr=0.01)


OPTIMIZERS = {
    "sgd": lambda model: optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda model: optim.AdamW(model.parameters(), lr=0.01),
    "fused": lambda model: optim.Adam(model.parameters(), lr=0.01, fused=True),
    "rmsprop": lambda model: optim.RMSprop(model.parameters(), lr=0.01, momentum=0.5),
    "groups": _of_two_groups,
    "late group": lambda model: optim.AdamW(model.body.parameters(), lr=0.01),
    "lookahead": lambda model: Lookahead(model.parameters(), lr=0.05),
    "takes norm": lambda model: TakesNorm(model.parameters(), lr=0.05, momentum=0.9),
    "raises": lambda model: Raises(model.parameters(), lr=0.01),
}
