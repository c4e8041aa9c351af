"""The optimizers that are compared, each with its grid of learning rates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gradweave.optim import Eva, EvaF, EvaS


@dataclass(frozen=True)
class Contender:
    """An optimizer to be compared.

    Attributes:
        make: Of a model, a learning rate and a refresh interval.
        rates: Tried first, the best of which is then moved by a factor of 1.5 either way.
        intervals: Tried instead of that, where there are any.
        captured: Whether its step can be captured in a CUDA graph.
    """

    make: Callable[[nn.Module, float, int], list[Optimizer]]
    rates: tuple[float, ...]
    intervals: tuple[int, ...] = ()
    captured: bool = True


def _muon(model: nn.Module, lr: float, _: int) -> list[Optimizer]:
    """Muon for hidden matrices, AdamW at a tenth of its rate for the rest."""
    skipped = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    head = [m for m in model.modules() if isinstance(m, nn.Linear)][-1]
    skipped.add(id(head.weight))
    matrices = [p for p in model.parameters() if p.dim() == 2 and id(p) not in skipped]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    muon = torch.optim.Muon(matrices, lr=lr, weight_decay=0.0)
    return [muon, torch.optim.AdamW(rest, lr=lr / 10, weight_decay=0.0)]


def _family(cls: type[Any], **options: Any) -> Callable[[nn.Module, float, int], list[Optimizer]]:
    return lambda model, lr, _: [cls(model, lr=lr, capturable=_on_gpu(model), **options)]


def _on_gpu(model: nn.Module) -> bool:
    return next(model.parameters()).is_cuda


def contenders(task: str) -> dict[str, Contender]:
    """Who takes part in a task, with weight decay as is usual for SGD and AdamW; Nesterov's momentum where it helps."""
    decay = {"autoencoder": 0.0, "cifar": 5e-4, "text": 0.0}[task]
    adam_decay = {"autoencoder": 0.0, "cifar": 0.05, "text": 0.1}[task]
    ours = {"weight_decay": 0.0 if task == "autoencoder" else 0.05}
    rates = (0.02, 0.05, 0.1, 0.2)
    sgd_rates = (0.03, 0.1, 0.3, 0.8) if task == "cifar" else (0.05, 0.2, 0.6, 1.5)
    everyone = {
        "sgd": Contender(
            lambda m, lr, _: [
                torch.optim.SGD(
                    m.parameters(), lr=lr, momentum=0.9, weight_decay=decay, nesterov=task == "cifar", fused=True
                )
            ],
            sgd_rates,
        ),
        "adamw": Contender(
            lambda m, lr, _: [
                torch.optim.AdamW(m.parameters(), lr=lr, weight_decay=adam_decay, fused=True, capturable=_on_gpu(m))
            ],
            (5e-4, 1e-3, 2e-3, 5e-3),
        ),
        "muon": Contender(_muon, (0.005, 0.01, 0.02, 0.05), captured=False),
        "eva reference": Contender(_family(Eva, reference=True, weight_decay=decay), (0.03, 0.1, 0.3, 1.0)),
        "eva": Contender(_family(Eva, **ours), rates),
        "eva-f": Contender(_family(EvaF, **ours), rates),
        "eva-s": Contender(_family(EvaS, **ours), (0.003, 0.005, 0.01, 0.02)),
    }
    wanted = {
        "autoencoder": ("eva", "eva-f", "eva-s", *everyone),
        "cifar": ("sgd", "eva-f", "eva", "adamw", "eva reference"),
        "text": ("adamw", "eva-f", "eva", "muon", "eva-s"),
    }[task]
    return {name: everyone[name] for name in wanted}
