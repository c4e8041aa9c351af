"""Models, optimizers and loops that tests run eagerly and as one graph."""

import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import gradweave
from gradweave.compare.models import GPT


class Convolutional(nn.Module):
    """Convolutions with BatchNorm."""

    def __init__(self):
        super().__init__()
        self.one = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.two = nn.Conv2d(6, 8, 3, stride=2)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = torch.relu(self.norm(self.one(x.view(-1, 3, 4, 4))))
        return self.head(self.two(x).mean((2, 3)))


class Tied(nn.Module):
    """An embedding that is also the head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 48)
        self.mix = nn.Linear(48, 48)

    def forward(self, x):
        return torch.tanh(self.mix(x)) @ self.embedding.weight.T


class Checkpointed(nn.Module):
    """Activations recomputed in backward."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(48, 16)
        self.two = nn.Linear(16, 5)

    def forward(self, x):
        return self.two(checkpoint(lambda x: torch.tanh(self.one(x)), x, use_reentrant=False))


class TokenModel(nn.Module):
    """A small GPT that takes its tokens from a batch of floats."""

    def __init__(self):
        super().__init__()
        self.gpt = GPT(vocabulary=5, width=16, blocks=1, heads=2, tokens=48)

    def forward(self, x):
        return self.gpt((x > 0).long())[:, -1]


def mlp():
    return nn.Sequential(nn.Linear(48, 24), nn.GELU(), nn.LayerNorm(24), nn.Linear(24, 5))


def small():
    """The least that has two layers: what Inductor makes of it is few kernels."""
    return nn.Sequential(nn.Linear(48, 8), nn.Tanh(), nn.Linear(8, 5))


def linear():
    """A single layer: for tests of updates that Inductor compiles."""
    return nn.Linear(48, 5)


def with_dropout():
    return nn.Sequential(nn.Linear(48, 24), nn.ReLU(), nn.Dropout(0.3), nn.Linear(24, 5))


class CheckpointedDropout(Checkpointed):
    """With random numbers in what is recomputed."""

    def forward(self, x):
        return self.two(checkpoint(lambda x: F.dropout(torch.tanh(self.one(x)), 0.3), x, use_reentrant=False))


class Deep(nn.Module):
    """Layers whose activations are worth recomputing; with or without checkpoints."""

    def __init__(self, checkpoints=False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(6))
        self.head = nn.Linear(48, 5)
        self.checkpoints = checkpoints

    def forward(self, x):
        for layer in self.layers:

            def block(x, layer=layer):
                return 2 * F.gelu(torch.tanh(layer(x)))

            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return self.head(x)


MODELS = {
    "mlp": mlp,
    "convolutional": Convolutional,
    "gpt": TokenModel,
    "dropout": with_dropout,
    "tied": Tied,
    "checkpointed": Checkpointed,
    "checkpointed dropout": CheckpointedDropout,
}
SMALL_MODELS = {"small": small, "linear": linear}


def make(model):
    torch.manual_seed(0)
    return (MODELS | SMALL_MODELS)[model]()


def batches(count, size=6):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randn(size, 48, generator=generator), torch.randint(0, 5, (size,), generator=generator)


def loss_fn(model, x, y):
    return F.cross_entropy(model(x), y)


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2)


def train(name, lower=None, make_optimizer=adamw, steps=6, max_norm=None, each=None, scheduler=None, loss=loss_fn):
    """Trains a fresh model, eagerly or as one graph; returns it, its optimizer and the losses."""
    model = make(name)
    optimizer = make_optimizer(model.parameters())
    schedule = scheduler(optimizer) if scheduler else None
    step = gradweave.compile(model, loss, optimizer, lower=lower, max_grad_norm=max_norm) if lower else None
    torch.manual_seed(7)
    losses = []
    for number, (x, y) in enumerate(batches(steps)):
        if each:
            each(number, model, optimizer)
        if step:
            losses.append(step(x, y))
        else:
            value = loss(model, x, y)
            value.backward()
            if max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(value.detach())
        if schedule:
            schedule.step()
    return model, optimizer, torch.stack(losses)


def assert_identical(one, other):
    """Losses, weights, buffers and optimizer state, bit for bit."""
    assert torch.equal(one[2], other[2])
    for (name, mine), theirs in zip(one[0].state_dict().items(), other[0].state_dict().values(), strict=True):
        assert torch.equal(mine, theirs), name
    mine, theirs = one[1].state_dict(), other[1].state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    for index, state in theirs["state"].items():
        for key, value in state.items():
            assert value is None or torch.equal(mine["state"][index][key], value), (index, key)


def both(make_model, objective, data, lower="replay", make_optimizer=lambda p: optim.SGD(p, lr=0.1), **options):
    """The same training eagerly and with a compiled step: two (model, optimizer, losses), and the step."""
    runs, step = [], None
    for compiled in (False, True):
        torch.manual_seed(0)
        model = make_model()
        optimizer = make_optimizer(model.parameters())
        torch.manual_seed(7)
        if compiled:
            step = gradweave.compile(model, objective, optimizer, lower=lower, **options)
        losses = []
        for batch in data:
            if compiled:
                losses.append(step(*batch))
                continue
            losses.append(objective(model, *batch))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        runs.append((model, optimizer, torch.stack(losses).detach()))
    return runs[1], runs[0], step


def counting(function, calls):
    def counted(*args, **named):
        calls.append(None)
        return function(*args, **named)

    return counted


OPTIMIZERS = {
    "sgd": lambda p: optim.SGD(p, lr=0.05),
    "sgd, everything": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adam": lambda p: optim.Adam(p, lr=1e-2),
    "adam, amsgrad": lambda p: optim.Adam(p, lr=1e-2, amsgrad=True, weight_decay=0.01, maximize=True),
    "adamw": adamw,
    "adamw, foreach": lambda p: optim.AdamW(p, lr=1e-2, foreach=True),
    "nadam": lambda p: optim.NAdam(p, lr=1e-2),
    "adamax": lambda p: optim.Adamax(p, lr=1e-2),
    "adadelta": lambda p: optim.Adadelta(p, lr=1.0),
    "adagrad": lambda p: optim.Adagrad(p, lr=1e-2, lr_decay=0.01),
    "rmsprop": lambda p: optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    "rprop": lambda p: optim.Rprop(p, lr=1e-3),
}
CAPTURABLE_FORM = {"radam": lambda p: optim.RAdam(p, lr=1e-2), "asgd": lambda p: optim.ASGD(p, lr=1e-2)}
