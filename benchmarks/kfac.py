"""K-FAC as Martens and Grosse publish it (2015, arXiv 1503.05671), for measurements.

Block-diagonal, with the Fisher matrix of targets drawn from the model, factors averaged in every step, factored
damping, a damping of the quadratic model that follows how well it predicts, a damping of the factors that is searched
for, and step size and momentum from the quadratic model: there is no learning rate. Convolutions as in Grosse and
Martens (2016, arXiv 1602.01407). What is neither a linear layer nor a convolution (norms, embeddings) has the diagonal
of the same Fisher matrix. Left out are the paper's average of weights over steps and its growing batches.

A step needs the model and the batch, not gradients, so that this is no ``torch.optim.Optimizer``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from likelihoods import Likelihood
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

Forward = Callable[[Callable[..., Any], Tensor], Tensor]


@dataclass
class Block:
    """A layer's weight and bias as one matrix, and the Fisher matrix' two factors of it."""

    module: nn.Module
    params: list[nn.Parameter]
    inputs: Tensor | None = None
    outputs: Tensor | None = None
    inverses: tuple[Tensor, Tensor] | None = None
    caught: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def rows(self, x: Tensor) -> Tensor:
        """Return the layer's inputs, or patches of them, as rows, with a one for the bias."""
        if isinstance(self.module, nn.Conv2d):
            conv = self.module
            x = F.unfold(x, conv.kernel_size, conv.dilation, conv.padding, conv.stride).transpose(1, 2)
        x = x.flatten(0, -2)
        return torch.cat((x, torch.ones_like(x[:, :1])), 1) if len(self.params) == 2 else x

    def gradient_rows(self, gradient: Tensor) -> Tensor:
        """Return a gradient by the layer's outputs as rows, one for each row of inputs."""
        if isinstance(self.module, nn.Conv2d):
            gradient = gradient.flatten(2).transpose(1, 2)
        return gradient.flatten(0, -2)

    def invert(self, gamma: float) -> tuple[Tensor, Tensor]:
        """Return the inverses of both factors, damped so that their product is damped by about ``gamma`` squared."""
        inputs, outputs = _known(self.inputs), _known(self.outputs)
        ratio = (inputs.trace() / len(inputs)) / (outputs.trace() / len(outputs))
        pi = torch.where(ratio.isfinite() & (ratio > 0), ratio, torch.ones_like(ratio)).sqrt()
        return _inverse(inputs, pi * gamma), _inverse(outputs, gamma / pi)

    def precondition(self, gradients: list[Tensor], inverses: tuple[Tensor, Tensor]) -> list[Tensor]:
        """Return the inverse times a gradient."""
        matrix = gradients[0].flatten(1)
        if len(gradients) == 2:
            matrix = torch.cat((matrix, gradients[1][:, None]), 1)
        matrix = inverses[1] @ matrix @ inverses[0]
        if len(gradients) == 1:
            return [matrix.view_as(gradients[0])]
        return [matrix[:, :-1].reshape(gradients[0].shape), matrix[:, -1]]


class KFAC:
    """The published optimizer, one step of training at a time.

    Args:
        model: Trained in place.
        likelihood: What its outputs mean.
        forward: Outputs of a callable model and a batch's inputs.
        damping: What the quadratic model begins with, in units of the loss; the paper's 150 is for a sum over pixels.
        decay: Of the factors' averages; the first steps average all that they have seen.
        weight_decay: Half of the weights' square times this is added to the loss.
        adapt_every: Steps from one adaptation of the damping to the next.
        search_every: Steps from one search for the factors' damping to the next.
        invert_every: Steps from one inversion to the next; the first three steps have one each.
        statistics_share: Of a batch, for the factors.
        model_share: Of a batch, for the quadratic model's curvature.
        seed: For the targets that are drawn.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        *,
        forward: Forward = lambda call, x: call(x),
        damping: float = 150.0,
        decay: float = 0.95,
        weight_decay: float = 1e-5,
        adapt_every: int = 5,
        search_every: int = 20,
        invert_every: int = 20,
        statistics_share: float = 1 / 8,
        model_share: float = 1 / 4,
        seed: int = 0,
    ) -> None:
        self.model, self.likelihood, self.forward = model, likelihood, forward
        self.damping, self.decay, self.weight_decay = damping, decay, weight_decay
        self.adapt_every, self.search_every, self.invert_every = adapt_every, search_every, invert_every
        self.statistics_share, self.model_share = statistics_share, model_share
        self.gamma = math.sqrt(damping + weight_decay)
        self.generator = torch.Generator().manual_seed(seed)
        self.steps = 0
        self.names = [name for name, p in model.named_parameters() if p.requires_grad]
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.last = [torch.zeros_like(p) for p in self.params]
        self.blocks = [Block(module, own) for module in model.modules() if (own := _covered(module))]
        covered = {id(p) for block in self.blocks for p in block.params}
        self.diagonals: dict[int, Tensor] = {id(p): torch.zeros_like(p) for p in self.params if id(p) not in covered}

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Train on a batch, and return the loss before."""
        self.steps += 1
        loss = self.likelihood.loss(self.forward(self.model, inputs), targets)
        gradients = list(torch.autograd.grad(loss, self.params))
        with torch.no_grad():
            objective = loss.detach().double() + self._penalty()
            gradients = [g + self.weight_decay * p for g, p in zip(gradients, self.params, strict=True)]
        self._update_factors(inputs[: _share(inputs, self.statistics_share)])
        with torch.no_grad(), self._unchanged_buffers():
            step, predicted = self._best_step(gradients, inputs[: _share(inputs, self.model_share)])
            torch._foreach_add_(self.params, step)
            self.last = step
            if self.steps % self.adapt_every == 0:
                after = self.likelihood.loss(self.forward(self.model, inputs), targets).double() + self._penalty()
                self._adapt(float((after - objective) / predicted))
        return loss.detach()

    def _penalty(self) -> Tensor:
        return self.weight_decay / 2 * _dot(self.params, self.params)

    def _update_factors(self, inputs: Tensor) -> None:
        """Blend in the moments of a forward and of a backward of targets that the model has drawn."""
        others = [p for p in self.params if id(p) in self.diagonals]
        with self._unchanged_buffers():
            with self._catching():
                outputs = self.forward(self.model, inputs)
            if any(len(block.caught) != 1 for block in self.blocks):
                raise RuntimeError("a layer was not applied once: its factors would not be those of its gradient")
            sampled = self.likelihood.sampled_gradient(outputs.detach(), self.generator)
            through = [y for block in self.blocks for _, y in block.caught]
            found = torch.autograd.grad(outputs, [*through, *others], sampled)
        cases, keep = self.likelihood.cases(outputs), min(1 - 1 / self.steps, self.decay)
        for block, gradient in zip(self.blocks, found, strict=False):
            ((x, _),) = block.caught
            dtype = block.params[0].dtype  # under autocast both are of a lower one, in which nothing can be inverted
            rows, gradient_rows = block.rows(x.to(dtype)), block.gradient_rows(gradient.to(dtype))
            block.inputs = _blend(block.inputs, rows.t() @ rows / len(rows), keep)
            block.outputs = _blend(block.outputs, gradient_rows.t() @ gradient_rows * cases, keep)
            block.caught.clear()
        # Targets are drawn independently: the square of their summed gradients is on average the sum of squares.
        for p, gradient in zip(others, found[len(through) :], strict=True):
            self.diagonals[id(p)] = _blend(self.diagonals[id(p)], gradient.square() * cases, keep)

    @contextmanager
    def _catching(self) -> Iterator[None]:
        def catch(block: Block) -> Callable[..., None]:
            return lambda _, args, y: block.caught.append((args[0].detach(), y))

        handles = [block.module.register_forward_hook(catch(block)) for block in self.blocks]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def _unchanged_buffers(self) -> Iterator[None]:
        """Let forwards that are no training leave no trace in running statistics."""
        before = [buffer.clone() for buffer in self.model.buffers()]
        try:
            yield
        finally:
            for buffer, value in zip(self.model.buffers(), before, strict=True):
                buffer.copy_(value)

    def _best_step(self, gradients: list[Tensor], inputs: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return the step of the factors' damping that the quadratic model likes best, and what it predicts of it."""
        gammas, ratio = [self.gamma], math.sqrt(19 / 20) ** self.search_every
        if self.steps % self.search_every == 0:
            gammas += [self.gamma * ratio, self.gamma / ratio]
        inverts = self.steps <= 3 or self.steps % self.invert_every == 0 or len(gammas) > 1
        last_change = self._change_of_outputs(inputs, self.last)[1]
        candidates = []
        for gamma in gammas:
            inverses = [block.invert(gamma) if inverts else block.inverses for block in self.blocks]
            direction = self._direction(gradients, inverses, gamma)
            candidates.append((gamma, inverses, *self._scaled(gradients, direction, inputs, last_change)))
        self.gamma, inverses, step, predicted = min(candidates, key=lambda one: float(one[-1]))
        for block, inverse in zip(self.blocks, inverses, strict=True):
            block.inverses = inverse
        return step, predicted

    def _direction(self, gradients: list[Tensor], inverses: Sequence[Any], gamma: float) -> list[Tensor]:
        own = {id(p): gradient for p, gradient in zip(self.params, gradients, strict=True)}
        made = {key: own[key] / (diagonal + gamma**2) for key, diagonal in self.diagonals.items()}
        for block, inverse in zip(self.blocks, inverses, strict=True):
            parts = block.precondition([own[id(p)] for p in block.params], inverse)
            made.update({id(p): part for p, part in zip(block.params, parts, strict=True)})
        return [-made[id(p)] for p in self.params]

    def _scaled(
        self, gradients: list[Tensor], direction: list[Tensor], inputs: Tensor, last_change: Tensor
    ) -> tuple[list[Tensor], Tensor]:
        """Return the sum of multiples of a direction and of the last step that minimizes the quadratic model."""
        outputs, change = self._change_of_outputs(inputs, direction)
        ridge = self.damping + self.weight_decay

        def curvature(a: list[Tensor], da: Tensor, b: list[Tensor], db: Tensor) -> Tensor:
            return self.likelihood.curvature(outputs.double(), da.double(), db.double()) + ridge * _dot(a, b)

        here = curvature(direction, change, direction, change)
        across = curvature(direction, change, self.last, last_change)
        there = curvature(self.last, last_change, self.last, last_change)
        slope, last_slope = _dot(gradients, direction), _dot(gradients, self.last)
        determinant = here * there - across.square()
        both = determinant > 1e-10 * here * there  # else the last step has the direction of this one, or none
        safe = torch.where(both, determinant, torch.ones_like(determinant))
        size = torch.where(both, (across * last_slope - there * slope) / safe, -slope / here)
        momentum = torch.where(both, (across * slope - here * last_slope) / safe, torch.zeros_like(safe))
        step = [
            size.to(d.dtype) * d + momentum.to(d.dtype) * last for d, last in zip(direction, self.last, strict=True)
        ]
        return step, (size * slope + momentum * last_slope) / 2

    def _change_of_outputs(self, inputs: Tensor, direction: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return outputs, and their derivative along a change of the weights."""
        with forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
            duals = {
                name: forward_ad.make_dual(p.detach(), change)
                for name, p, change in zip(self.names, self.params, direction, strict=True)
            }
            made = self.forward(lambda *args: functional_call(self.model, duals, args), inputs)
            outputs, change = forward_ad.unpack_dual(made)
            return outputs, torch.zeros_like(outputs) if change is None else change

    def _adapt(self, ratio: float) -> None:
        """Trust the quadratic model more, or less, by how much of the change that it predicted has come."""
        factor = (19 / 20) ** self.adapt_every
        if ratio > 0.75:
            self.damping *= factor
        elif not ratio >= 0.25:
            self.damping /= factor


def _covered(module: nn.Module) -> list[nn.Parameter]:
    """Return weight and bias of a layer that has factors."""
    is_plain_conv = isinstance(module, nn.Conv2d) and module.groups == 1 and module.padding_mode == "zeros"
    if not (is_plain_conv or isinstance(module, nn.Linear)) or not module.weight.requires_grad:
        return []
    return [module.weight] if module.bias is None else [module.weight, module.bias]


def _known(factor: Tensor | None) -> Tensor:
    if factor is None:
        raise RuntimeError("a factor is needed before it was ever made")
    return factor


def _blend(old: Tensor | None, new: Tensor, keep: float) -> Tensor:
    return new if old is None else torch.lerp(new, old, keep)


def _inverse(factor: Tensor, damping: Tensor) -> Tensor:
    """Return the inverse of a damped factor, with at least the damping that hides rounding."""
    rounding = len(factor) * torch.finfo(factor.dtype).eps * factor.diagonal().max()
    identity = torch.eye(len(factor), dtype=factor.dtype, device=factor.device)
    return torch.cholesky_inverse(torch.linalg.cholesky(factor + torch.maximum(damping, rounding) * identity))


def _dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    return torch.stack([(x.double() * y.double()).sum() for x, y in zip(a, b, strict=True)]).sum()


def _share(batch: Tensor, share: float) -> int:
    return max(1, round(len(batch) * share))
