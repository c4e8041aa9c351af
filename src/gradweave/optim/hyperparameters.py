"""Hyperparameters that all constructors share: their documentation, their defaults in each mode, and their checks."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from inspect import cleandoc
from numbers import Real
from typing import Any, TypeVar

import torch

from gradweave.errors import ArgumentError
from gradweave.optim.rules import Number
from gradweave.optim.state import FIRST_ORDER_RULES, FirstOrderRule

SHARED_ARGUMENTS = """
    model: The model whose layers are trained; under DistributedDataParallel, the wrapped model.
    params: Parameters, or groups of them; by default all of the model's that require a gradient. A bias belongs to
        its layer if both are in one group.
    lr: Learning rate; by default 0.04, 0.01 for Eva-s, and 0.1 in the authors' modes. Except in these, a layer's step
        has the length ``lr`` times the norm that its weight had at first: a good value depends little on the model.
    damping: Above 0: a share of the vectors' squared size, or an absolute number in the authors' modes; by default
        0.01, 0.3 for Eva-s, and 0.03 in the authors' modes.
    momentum: Of gradients, before the direction is taken; in Eva-s and in the authors' modes of directions, as in SGD.
    weight_decay: Decoupled; added to the direction in the authors' modes.
    running_average: Weight of a step's vectors in the running ones; by default 0.3, 0.1 for Eva-s, and 0.95 in the
        authors' modes.
    kl_clip: Limit of the authors' scale, where they have one.
    first_order: Rule for parameters without vectors: ``"adamw"`` by default, or ``"sgd"``, the default in the
        authors' modes.
    first_order_lr: Its learning rate; by default a twentieth of ``lr`` for AdamW, and ``lr`` for SGD.
    first_order_weight_decay: Its weight decay; by default ``weight_decay``.
    betas: Of AdamW.
    eps: Of AdamW.
    maximize: Whether to maximize the objective.
    foreach: Whether to update many tensors at once by torch's operations, or each by itself; by default many at once,
        and on a GPU in kernels of our own where they apply.
    capturable: Whether the loop will be captured. A step never waits for the device but the first, and can be captured
        without it; with it, training may begin on another stream without torch's warning of autograd's nodes.
    faithful: Whether to follow the algorithm as published.
    reference: Whether to follow the choices of the authors' code.
"""
"""The arguments that all constructors share, in the form of their docstrings."""

T = TypeVar("T")


def with_shared_arguments(more: str = "") -> Callable[[type[T]], type[T]]:
    """Return a class decorator that appends :data:`SHARED_ARGUMENTS` to a docstring, after the class' own arguments.

    Args:
        more: Arguments that some of the classes share, in the same form.
    """

    def documented(cls: type[T]) -> type[T]:
        if cls.__doc__ is not None:  # it is, under python -OO
            own = cleandoc(cls.__doc__)
            cls.__doc__ = own + ("" if "\nArgs:" in own else "\n\nArgs:") + more + SHARED_ARGUMENTS
        return cls

    return documented


class Mode(Enum):
    """The choices that an optimizer follows: ours, those of the paper, or those of the authors' code."""

    OURS = "ours"
    FAITHFUL = "faithful"
    REFERENCE = "reference"

    @classmethod
    def of(cls, *, faithful: bool, reference: bool) -> Mode:
        """Return the mode that a constructor's flags mean."""
        if faithful and reference:
            raise ArgumentError("reference", reference, "give faithful or reference, not both")
        return cls.FAITHFUL if faithful else cls.REFERENCE if reference else cls.OURS


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Values of hyperparameters that are not given."""

    lr: float
    damping: float
    running_average: float
    first_order: FirstOrderRule


OURS = Preset(lr=0.04, damping=0.01, running_average=0.3, first_order="adamw")
AUTHORS = Preset(lr=0.1, damping=0.03, running_average=0.95, first_order="sgd")


@dataclass(frozen=True, kw_only=True)
class Hyperparameters:
    """Hyperparameters as a constructor was given them; None for those that it was not."""

    lr: Number | None
    damping: Number | None
    momentum: Number
    weight_decay: Number
    running_average: Number | None
    kl_clip: Number
    first_order: FirstOrderRule | None
    first_order_lr: Number | None
    first_order_weight_decay: Number | None
    betas: tuple[Number, Number]
    eps: Number
    maximize: bool
    foreach: bool | None
    capturable: bool

    def defaults(self, mode: Mode, ours: Preset = OURS) -> dict[str, Any]:
        """Return the optimizer's defaults: the values that were given, and the mode's for all others.

        Args:
            mode: Our choices or the authors'.
            ours: Our choices for the class.
        """
        preset = vars(ours if mode is Mode.OURS else AUTHORS)
        values = {name: preset.get(name) if value is None else value for name, value in vars(self).items()}
        if values["first_order_weight_decay"] is None:
            values["first_order_weight_decay"] = values["weight_decay"]
        return {**values, "rule": None, "output_damping": None, "lr_ratio": 1.0}


def check_hyperparameters(defaults: dict[str, Any]) -> None:
    """Raise ArgumentError for a value that no step can be taken with.

    Values of tensors are not read, which would wait for a device.
    """
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
    if defaults["first_order"] not in FIRST_ORDER_RULES:
        raise ArgumentError("first_order", defaults["first_order"], f"use one of {', '.join(FIRST_ORDER_RULES)}")


def _check_number(name: str, value: object, is_valid: Callable[[Any], bool], remedy: str) -> None:
    """Raise ArgumentError for a value that is neither a tensor nor a valid number."""
    if not isinstance(value, torch.Tensor) and not (isinstance(value, Real) and is_valid(value)):
        raise ArgumentError(name, value, remedy)


def _is_positive(value: Any, *, most: float) -> bool:
    return bool(0 < value <= most)
