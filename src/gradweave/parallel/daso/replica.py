"""The model and the optimizer of one rank, as vectors to send."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

import torch
from torch import nn
from torch.optim import Optimizer

from gradweave.parallel.daso.checks import all_parameters
from gradweave.parallel.daso.flat_buffers import Layout


class Replica:
    """A rank's replica of the model, with the optimizer that trains it.

    Attributes:
        model: The user's.
        optimizer: The user's.
        weights: Layout of the parameters that are trained, or ever were.
        device: Device of the parameters.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer
        params = self.params()
        self.weights = Layout(p for p in params if p.requires_grad)
        self.device = next((p.device for p in params), torch.device("cpu"))
        self._known = {id(p) for p in params}

    def params(self) -> list[torch.Tensor]:
        """Return all parameters, trained or not, as they are now."""
        return all_parameters(self.model, self.optimizer)

    def added(self, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return those of the present parameters that :meth:`include` has not seen."""
        return [p for p in params if id(p) not in self._known]

    def has_grown(self, params: Sequence[torch.Tensor]) -> bool:
        """Return whether there are new parameters, or some that were not trained before."""
        return bool(self.added(params)) or any(p.requires_grad and p not in self.weights for p in params)

    def include(self, params: Sequence[torch.Tensor]) -> bool:
        """Include the present parameters; return whether :attr:`weights` have become more."""
        self._known.update(id(p) for p in params)
        return self.weights.extend(p for p in params if p.requires_grad)

    def running_statistics(self) -> Layout:
        """Return the layout of buffers that are averaged: those named ``running_...``, as BatchNorm's."""
        return Layout(b for name, b in self.model.named_buffers() if name.rpartition(".")[2].startswith("running_"))

    def optimizer_state(self) -> Layout:
        """Return the layout of the optimizer's state for single weights: moments, not step counts."""
        tensors: list[torch.Tensor] = []
        for p in chain(*(group["params"] for group in self.optimizer.param_groups)):
            state = self.optimizer.state.get(p, {})
            moments = [state[key] for key in sorted(state) if key != "step"]
            tensors += [m for m in moments if isinstance(m, torch.Tensor) and m.shape == p.shape]
        return Layout(tensors)

    def lr(self) -> float:
        """Return the learning rate of the first group; not a number if it has none."""
        return float(self.optimizer.param_groups[0].get("lr", math.nan))

    def moves(self) -> bool:
        """Return whether a step changes weights; with a rate of 0 it may only create the optimizer's state."""
        return any(float(group.get("lr", 1.0)) != 0 for group in self.optimizer.param_groups)
