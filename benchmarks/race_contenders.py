"""Who takes part in the race of optimizers, and which two hyperparameters of each are chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from eva_tasks import Batch, Task
from kfac import KFAC
from muon import Muon
from preconditioned import Preconditioned
from shampoo import Shampoo
from soap import SOAP
from stock import captured
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from gradweave.optim import Eva, EvaF

SHRINKAGE = {"autoencoder": 0.0, "small": 0.0, "text": 1e-4, "cifar": 5e-4}
"""By what share weights shrink in a step at the highest rate: the same for everybody, whatever the rate."""

MOMENTA = (0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995)
SECOND_DECAYS = (0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999, 0.9995)
DAMPINGS = (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0)
FACTOR_DECAYS = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995)


class Training(Protocol):
    """A model in training."""

    def step(self, batch: Batch, share: float) -> torch.Tensor:
        """Take a step at a share of the learning rate, and return the loss before it."""


class StockTraining:
    """Of optimizers in torch's form; on a GPU forward, backward and update are one CUDA graph."""

    def __init__(self, model: nn.Module, task: Task, optimizers: list[Optimizer]) -> None:
        self.optimizers = optimizers
        self.groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self.rates = [float(group["lr"]) for group in self.groups]
        is_on_gpu = next(model.parameters()).is_cuda
        for group, rate in zip(self.groups, self.rates, strict=True):
            group["lr"] = torch.tensor(rate, device="cuda") if is_on_gpu else rate

        def train(*batch: torch.Tensor) -> torch.Tensor:
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = task.loss(model, *batch)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            return loss.detach()

        self.take = captured(train)

    def step(self, batch: Batch, share: float) -> torch.Tensor:
        for group, rate in zip(self.groups, self.rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate * share)
            else:
                group["lr"] = rate * share
        loss = self.take(batch)
        for optimizer in self.optimizers:
            if isinstance(optimizer, Preconditioned):
                optimizer.between_steps()
        return loss


class KFACTraining:
    """Of K-FAC, which has neither a learning rate nor a schedule, and decides on the host what it adapts.

    Damping is given in the paper's units: of losses whose second derivatives by the outputs are about one.
    """

    def __init__(self, model: nn.Module, task: Task, damping: float, decay: float) -> None:
        self.optimizer = KFAC(
            model, task.likelihood, forward=task.forward, damping=damping * task.likelihood.unit, decay=decay
        )

    def step(self, batch: Batch, share: float) -> torch.Tensor:  # noqa: ARG002
        return self.optimizer.step(batch[0], batch[-1])


@dataclass(frozen=True)
class Contender:
    """An optimizer in the race.

    Attributes:
        train: Of a model, its task, a rate, a value of the other hyperparameter, and how much weights shrink in a step.
        rate: The usual rate, from which the search begins; of K-FAC the damping that it begins with.
        other: What the other hyperparameter is.
        values: Of which one is chosen.
        usual: The one that is tried first.
        safe: 1 if it is higher rates with which training does not diverge.
    """

    train: Callable[[nn.Module, Task, float, float, float], Training]
    rate: float
    other: str
    values: tuple[float, ...]
    usual: float
    safe: int = -1

    def rate_at(self, place: int) -> float:
        """Return the rate of a place in the search."""
        return float(f"{self.rate * 10 ** (place / 4):.4g}")


Make = Callable[[nn.Module, float, float, float], list[Optimizer]]


def _stock(make: Make, model: nn.Module, task: Task, rate: float, value: float, shrinkage: float) -> Training:
    return StockTraining(model, task, make(model, rate, value, shrinkage))


def _sgd(model: nn.Module, rate: float, momentum: float, shrinkage: float) -> list[Optimizer]:
    """Momentum gathers decay that is part of the gradient, and is discounted from it."""
    decay = shrinkage * (1 - momentum) / rate
    return [SGD(model.parameters(), lr=rate, momentum=momentum, nesterov=True, weight_decay=decay, fused=True)]


def _adamw(model: nn.Module, rate: float, beta: float, shrinkage: float) -> list[Optimizer]:
    return [_adam_for(list(model.parameters()), rate, beta, shrinkage)]


def _adam_for(params: list[nn.Parameter], rate: float, beta: float, shrinkage: float) -> Optimizer:
    is_on_gpu = params[0].is_cuda
    decay = shrinkage / rate
    return AdamW(params, lr=rate, betas=(0.9, beta), weight_decay=decay, fused=True, capturable=is_on_gpu)


def _shampoo(model: nn.Module, rate: float, beta: float, shrinkage: float) -> list[Optimizer]:
    return [Shampoo(model.parameters(), lr=rate, shampoo_beta=beta, weight_decay=shrinkage / rate)]


def _soap(model: nn.Module, rate: float, beta: float, shrinkage: float) -> list[Optimizer]:
    return [SOAP(model.parameters(), lr=rate, betas=(0.95, beta), weight_decay=shrinkage / rate)]


def _muon(model: nn.Module, rate: float, momentum: float, shrinkage: float) -> list[Optimizer]:
    """Muon for all layers' matrices but embeddings and a head over words; AdamW at a tenth of the rate for the rest."""
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    words = {m.num_embeddings for m in embeddings}
    left = {id(m.weight) for m in embeddings}
    left |= {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear) and m.out_features in words}
    matrices = [p for p in model.parameters() if p.dim() > 1 and id(p) not in left]
    rest = [p for p in model.parameters() if p.dim() < 2 or id(p) in left]
    muon = Muon(matrices, lr=rate, momentum=momentum, weight_decay=shrinkage / rate)
    return [muon, _adam_for(rest, rate / 10, 0.99, shrinkage)]


def _eva(cls: type[Any], model: nn.Module, rate: float, damping: float, shrinkage: float) -> list[Optimizer]:
    """The first-order rule, at a twentieth of the rate, lets weights shrink as much."""
    decays = {"weight_decay": shrinkage / rate, "first_order_weight_decay": 20 * shrinkage / rate}
    return [cls(model, lr=rate, damping=damping, capturable=next(model.parameters()).is_cuda, **decays)]


def _eva_as_published(model: nn.Module, rate: float, damping: float, shrinkage: float) -> list[Optimizer]:
    decay = shrinkage * 0.1 / rate
    return [Eva(model, lr=rate, damping=damping, weight_decay=decay, reference=True)]


def _kfac(model: nn.Module, task: Task, damping: float, decay: float, shrinkage: float) -> Training:  # noqa: ARG001
    """With the published weight decay, which is part of the loss and of its curvature."""
    return KFACTraining(model, task, damping, decay)


CONTENDERS = {
    "sgd": Contender(partial(_stock, _sgd), 0.3, "momentum", MOMENTA, 0.9),
    "adamw": Contender(partial(_stock, _adamw), 1e-3, "second beta", SECOND_DECAYS, 0.99),
    "muon": Contender(partial(_stock, _muon), 0.03, "momentum", MOMENTA, 0.9),
    "shampoo": Contender(partial(_stock, _shampoo), 1e-3, "moments' decay", SECOND_DECAYS, 0.95),
    "soap": Contender(partial(_stock, _soap), 3e-3, "second beta", SECOND_DECAYS, 0.95),
    "kfac": Contender(_kfac, 15.0, "factors' decay", FACTOR_DECAYS, 0.95, safe=1),
    "eva": Contender(partial(_stock, partial(_eva, Eva)), 0.05, "damping", DAMPINGS, 0.01),
    "eva-f": Contender(partial(_stock, partial(_eva, EvaF)), 0.05, "damping", DAMPINGS, 0.01),
    "eva as published": Contender(partial(_stock, _eva_as_published), 0.1, "damping", DAMPINGS, 0.03),
}
