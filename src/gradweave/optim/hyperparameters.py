"""Hyperparameters that the family's constructors share, and what they are where none is given."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from numbers import Real
from typing import Any

import torch

from gradweave.errors import ArgumentError
from gradweave.optim import first_order


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


def check_hyperparameters(defaults: dict[str, Any]) -> None:
    """Raises for a value that no step can be taken with; tensors are not looked at, which would wait for a device."""
    for name, most in (("damping", sys.float_info.max), ("output_damping", sys.float_info.max), ("kl_clip", math.inf)):
        if defaults.get(name) is not None:
            _check_number(name, defaults[name], partial(_is_positive, most=most), "give a positive number")
    if isinstance(defaults["lr"], torch.Tensor) and defaults["lr"].numel() != 1:
        raise ArgumentError("lr", defaults["lr"], "give a tensor of one element")
    for name in ("lr", "first_order_lr", "weight_decay", "first_order_weight_decay", "eps"):
        if defaults[name] is not None:
            remedy = "give a finite number that is not negative"
            _check_number(name, defaults[name], lambda value: 0 <= value < math.inf, remedy)
    _check_number("momentum", defaults["momentum"], lambda value: 0 <= value < 1, "give a number from 0 to below 1")
    betas = defaults["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ArgumentError("betas", betas, "give two numbers from 0 to below 1")
    for beta in betas:
        _check_number("betas", beta, lambda value: 0 <= value < 1, "give two numbers from 0 to below 1")
    remedy = "give the new value's weight, above 0 to 1"
    _check_number("running_average", defaults["running_average"], lambda value: 0 < value <= 1, remedy)
    if defaults["first_order"] not in first_order.RULES:
        raise ArgumentError("first_order", defaults["first_order"], f"use one of {', '.join(first_order.RULES)}")


def _check_number(name: str, value: Any, is_right: Callable[[Any], bool], remedy: str) -> None:
    """Raises for what is neither a tensor nor a number that is right."""
    if not isinstance(value, torch.Tensor) and not (isinstance(value, Real) and is_right(value)):
        raise ArgumentError(name, value, remedy)


def _is_positive(value: Any, *, most: float) -> bool:
    return bool(0 < value <= most)
