"""The training that DASO's tests run, in every process and in the reference."""

import torch
from torch import nn
from torch.nn import functional as F


def make_model(kind="mlp"):
    torch.manual_seed(7)
    if kind == "norm":
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def make_optimizer(params, name="sgd", lr=0.1):
    if name == "sgd":
        return torch.optim.SGD(params, lr=lr, momentum=0.9, weight_decay=1e-3)
    return torch.optim.AdamW(params, lr=lr)


def make_batch(rank, step):
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(5, 6, generator=generator), torch.randint(0, 3, (5,), generator=generator)


def loss_of(model, rank, step):
    x, y = make_batch(rank, step)
    return F.cross_entropy(model(x), y)


def weights_of(model):
    return torch.cat([p.detach().reshape(-1).float() for p in model.parameters()])
