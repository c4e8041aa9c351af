"""Losses as negative log-likelihoods: what K-FAC needs to know about a model's outputs.

A curvature matrix of a loss is ``J^T H J``, with ``J`` the outputs' derivatives and ``H`` the loss' second derivatives
by the outputs. For both losses here ``H`` is the Fisher matrix of the outputs' distribution, so that the gradients of
targets *drawn from the model* have it as their second moment; those of the data's targets do not.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Likelihood(Protocol):
    """A mean loss over cases; ``unit`` is about what its second derivatives by a case's outputs are."""

    unit: float

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss."""

    def cases(self, outputs: Tensor) -> int:
        """Return how many cases the loss is a mean of."""

    def sampled_gradient(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """Return the loss' gradient by the outputs, with targets that are drawn from the outputs' distribution."""

    def curvature(self, outputs: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """Return ``left^T H right`` of two changes of the outputs."""


class SquaredError:
    """The mean square over all elements; that of a Gaussian whose variance is half of a case's elements."""

    def __init__(self, elements: int = 2) -> None:
        self.unit = 2 / elements

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(outputs, targets)

    def cases(self, outputs: Tensor) -> int:
        return len(outputs)

    def sampled_gradient(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        noise = torch.randn(outputs.shape, generator=generator, dtype=outputs.dtype, device=generator.device)
        return noise.to(outputs.device) * ((2 / outputs[0].numel()) ** 0.5 / len(outputs))

    def curvature(self, outputs: Tensor, left: Tensor, right: Tensor) -> Tensor:
        return (left * right).sum() * (2 / outputs.numel())


class CrossEntropy:
    """The mean cross entropy of logits in the last dimension; label smoothing changes targets alone."""

    def __init__(self, label_smoothing: float = 0.0) -> None:
        self.unit = 1.0
        self.label_smoothing = label_smoothing

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        flat = outputs.flatten(0, -2)
        return F.cross_entropy(flat, targets.flatten(), label_smoothing=self.label_smoothing)

    def cases(self, outputs: Tensor) -> int:
        return outputs[..., 0].numel()

    def sampled_gradient(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        probabilities = outputs.softmax(-1)
        uniform = torch.rand(outputs[..., :1].shape, generator=generator, dtype=outputs.dtype, device=generator.device)
        drawn = (probabilities.cumsum(-1) < uniform.to(outputs.device)).sum(-1).clamp_max(outputs.shape[-1] - 1)
        return (probabilities - F.one_hot(drawn, outputs.shape[-1])) / self.cases(outputs)

    def curvature(self, outputs: Tensor, left: Tensor, right: Tensor) -> Tensor:
        probabilities = outputs.softmax(-1)
        means = (probabilities * left).sum(-1), (probabilities * right).sum(-1)
        return ((probabilities * left * right).sum() - (means[0] * means[1]).sum()) / self.cases(outputs)
