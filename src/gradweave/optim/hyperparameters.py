"""Hyperparameters that the family's constructors share, and what they are where none is given."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from gradweave.errors import ArgumentError


class Mode(Enum):
    """Whose choices are followed."""

    OURS = "ours"
    FAITHFUL = "faithful"
    REFERENCE = "reference"

    @classmethod
    def of(cls, *, faithful: bool, reference: bool) -> Mode:
        """The mode that a constructor's flags mean."""
        if faithful and reference:
            raise ArgumentError("reference", reference, "give faithful or reference, not both")
        return cls.FAITHFUL if faithful else cls.REFERENCE if reference else cls.OURS


@dataclass(frozen=True)
class Given:
    """What a constructor was given; None for what it was not."""

    lr: float | torch.Tensor | None
    damping: float | None
    momentum: float
    weight_decay: float
    running_average: float | None
    kl_clip: float
    first_order: str | None
    first_order_lr: float | None
    first_order_weight_decay: float | None
    betas: tuple[float, float]
    eps: float
    maximize: bool
    foreach: bool | None
    capturable: bool

    def defaults(self, mode: Mode, **others: Any) -> dict[str, Any]:
        """The optimizer's defaults: what was given, and the mode's for what was not.

        Args:
            mode: Ours or the authors'.
            others: Defaults of ours that are a class' own.
        """
        known = OURS | others if mode is Mode.OURS else AUTHORS
        values = dict(vars(self))
        for name, value in known.items():
            if values[name] is None:
                values[name] = value
        if values["first_order_weight_decay"] is None:
            values["first_order_weight_decay"] = values["weight_decay"]
        return {**values, "rule": None, "output_damping": None, "lr_ratio": 1.0}


OURS: dict[str, Any] = {"lr": 0.04, "damping": 0.01, "running_average": 0.3, "first_order": "adamw"}
AUTHORS: dict[str, Any] = {"lr": 0.1, "damping": 0.03, "running_average": 0.95, "first_order": "sgd"}
