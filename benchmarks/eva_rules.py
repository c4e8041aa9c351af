"""Rules for Eva-f that were tried, or are worth a trial: slow, in torch's operations, on the tasks of convergence.

    python benchmarks/eva_rules.py --data FOLDER --results FILE.csv --minutes 3 --together 12
    python benchmarks/eva_rules.py ... --task cifar --rule orthogonal --lr 0.1 --lr 0.2 --steps 1000

Each rule trains once from each of two seeds, at a learning rate of its own, unless others are given. Trials that the
results hold already are left out.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from eva_contenders import Contender
from eva_convergence import Trial, append, read, train
from eva_tasks import TASKS
from torch import nn

from gradweave.compare.run import environment
from gradweave.optim import EvaF, first_order
from gradweave.optim.eva import matrices

SEEDS = (0, 1)
TINY = 1e-20
FEWEST = 4
"""Rows of a layer for each direction that is taken off."""


@dataclass(frozen=True)
class Rule:
    """What a rule does to ``X``, the gradient with what momentum will make of it; nothing changed is Eva-f's.

    Attributes:
        with_inputs: Whether the mean input's direction is taken off.
        squares: Whether columns are divided by their inputs' variance, with the mean input beside it.
        columns: Weight of the old in a running average of columns' squares, that columns are divided by the root of.
        balanced: How often rows and columns are given one length in turns.
        right: How many further directions of the columns are taken off, found by power iteration in this step.
        left: How many directions of the rows, found by power iteration in the last step.
        soft: What is left of these, against what is taken off.
        least: If rows have the length that they would have were the directions of rows exact, the least share of the
            square that is left of a row by the inputs' side; None for exact lengths.
        level: What directions of rows are left with, against the root mean square of all other directions, instead of a
            share that is taken off.
        level_inputs: The same of the mean input's direction.
        orthogonal: Whether all directions are given one length, as Muon does: what ever more of them would come to.
        momentum_first: Whether momentum adds up gradients, or steps.
    """

    with_inputs: bool = True
    squares: bool = False
    columns: float | None = None
    balanced: int = 0
    right: int = 0
    left: int = 0
    soft: float = 0.1
    least: float | None = None
    bound: float = 1.0
    level: float | None = None
    level_inputs: float | None = None
    orthogonal: bool = False
    momentum_first: bool = True


class Tried(EvaF):
    """Eva-f with another rule."""

    def __init__(self, model: nn.Module, rule: Rule, **options: Any) -> None:
        super().__init__(model, foreach=True, **options)
        self._rule = rule
        self._squares: dict[int, torch.Tensor] = {}
        for layer in self._capture.layers if rule.squares else ():
            self._squares[id(layer.weight)] = torch.ones(layer.weight[0].numel(), device=layer.weight.device)
            layer.module.register_forward_hook(self._see(layer.weight))

    def _see(self, weight: torch.Tensor) -> Any:
        def hook(_: nn.Module, args: tuple[torch.Tensor, ...], __: torch.Tensor) -> None:
            if torch.is_grad_enabled():
                x = args[0].detach().float()
                means = x.square().mean((0, 2, 3)) if x.dim() == 4 else x.square().flatten(0, -2).mean(0)
                means = means.repeat_interleave(weight[0].numel() // means.numel())
                self._squares[id(weight)].lerp_(means, 0.1)

        return hook

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # noqa: ARG002
        """Takes a step; gradients must be finite."""
        layers, others = self._gather()
        self._prepare(layers, others)
        rule, keep = self._rule, torch.ones((), dtype=torch.bool, device=layers[0].weight.device)
        for layer in layers:
            group, state = layer.group, layer.state
            a, _ = self._blend(layer, 1.0, keep)
            gradient = matrices(layer.grad, a.shape[0], columns_first=False).float()
            if layer.bias_grad is not None:
                gradient = torch.cat((gradient, layer.bias_grad.view(*gradient.shape[:2], 1).float()), 2)
                a = torch.cat((a, torch.ones_like(a[:, :1])), 1)
            momentum, lr = group["momentum"], group["lr"]
            buffer = state.setdefault("buffer", torch.zeros_like(gradient))
            if rule.momentum_first:
                buffer.mul_(momentum).add_(gradient)
                gradient = gradient + momentum * buffer
            step, squares = self._directed(gradient, a, group["damping"], state, id(layer.weight))
            squares = step.square().sum(2, keepdim=True) if squares is None else squares
            step = step / squares.sqrt().clamp_min(TINY)
            step = step * (state["size"].view(()) * (step.shape[0] * step.shape[1]) ** -0.5)
            if not rule.momentum_first:
                buffer.mul_(momentum).add_(step)
                step = buffer * momentum + step
            layer.weight.mul_(1 - lr * group["weight_decay"])
            if layer.bias is not None:
                layer.bias.sub_((step[..., -1] * lr).reshape(layer.bias.shape))
                step = step[..., :-1]
            layer.weight.sub_((step * lr).reshape(layer.weight.shape))
        for p, group in others:
            if p.grad is not None:
                first_order.update(p, p.grad, self.state[p], group, keep)

    def _directed(
        self, x: torch.Tensor, a: torch.Tensor, damping: float, state: dict[str, Any], key: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        rule, squares = self._rule, None
        if rule.squares:
            square = torch.cat((self._squares[key], torch.ones(1, device=x.device)))[: a.shape[1]]
            variance = (square - 0.999 * a.square()).clamp_min(0)
            variance = variance + damping * variance.mean() + 1e-12
            x, scaled = x / variance, a / variance
            x = x - (x @ a[..., None]) / (1 + (a * scaled).sum(-1))[:, None, None] * scaled[:, None]
        elif rule.level_inputs is not None:
            unit = a / a.square().sum(-1, keepdim=True).sqrt().clamp_min(TINY)
            along = x @ unit[..., None]
            x = (
                x
                - _leveled(x, along.square().sum((1, 2))[:, None], rule.level_inputs)[..., None] * along * unit[:, None]
            )
        elif rule.with_inputs:
            size = (1 + damping) * a.square().sum(-1)[:, None, None].clamp_min(TINY)
            x = x - (x @ a[..., None]) / size * a[:, None]
        lefts = min(rule.left, x.shape[1] // FEWEST)
        if lefts:
            known = state.setdefault("left", _orthogonal(1 + torch.eye(x.shape[1], lefts, device=x.device)[None]))
            seen = state.setdefault("seen", torch.zeros((), device=x.device))
            along = known.transpose(1, 2) @ x
            found = _orthogonal(x @ along.transpose(1, 2))
            if rule.level is not None:
                along = along * _leveled(x, along.square().sum(2), rule.level)[..., None] * (1 + rule.soft)
            if rule.least is not None:
                whole = x.square().sum(2, keepdim=True)
                taken = 1 - (rule.soft / (1 + rule.soft)) ** 2
                less = known.square() @ along.square().sum(2, keepdim=True) * taken
                off = known.square() @ along.square().sum(2, keepdim=True) / (1 + rule.soft) ** 2 * rule.bound
                squares = torch.where(
                    seen > 0, torch.maximum(torch.maximum(whole - less, rule.least * whole), off), whole
                )
            x = x - known @ along * (seen / (1 + rule.soft))
            seen.fill_(1)
            known.copy_(found)
        if rule.right:
            known = state.setdefault("right", _orthogonal(1 + torch.eye(x.shape[2], rule.right, device=x.device)[None]))
            found = _orthogonal(x.transpose(1, 2) @ (x @ known))
            known.copy_(found)
            x = x - (x @ found) @ found.transpose(1, 2) / (1 + rule.soft)
        if rule.columns is not None:
            square = x.square().mean(1, keepdim=True)
            average = state.setdefault("columns", square.clone()).lerp_(square, 1 - rule.columns)
            x = x / (average + 1e-4 * average.mean()).sqrt()
        if rule.orthogonal:
            x = _of_one_length(x)
        for _ in range(rule.balanced):
            for dim in (2, 1):
                x = x / x.square().mean(dim, keepdim=True).sqrt().clamp_min(TINY)
        return x, squares


def _orthogonal(vectors: torch.Tensor) -> torch.Tensor:
    """Columns made orthogonal and of length one, one after the other."""
    done: list[torch.Tensor] = []
    for vector in vectors.unbind(2):
        for other in done:
            vector = vector - (vector * other).sum(1, keepdim=True) * other
        done.append(vector / vector.square().sum(1, keepdim=True).sqrt().clamp_min(TINY))
    return torch.stack(done, 2)


def _leveled(x: torch.Tensor, squares: torch.Tensor, level: float) -> torch.Tensor:
    """What share of some directions is to be taken off, for them to be as long as the others are on the average."""
    others = max(min(x.shape[1:]) - squares.shape[1], 1)
    rest = (x.square().sum((1, 2)) - squares.sum(1)).clamp_min(0) / others
    return 1 - (level * (rest[:, None] / squares.clamp_min(TINY)).sqrt()).clamp_max(1)


def _of_one_length(x: torch.Tensor) -> torch.Tensor:
    """Matrices with all singular values near one, by Newton and Schulz with Muon's coefficients."""
    y = x if x.shape[1] <= x.shape[2] else x.transpose(1, 2)
    y = (y / y.square().sum((1, 2), keepdim=True).sqrt().clamp_min(TINY)).bfloat16()
    for _ in range(5):
        square = y @ y.transpose(1, 2)
        y = 3.4445 * y + (-4.775 * square + 2.0315 * square @ square) @ y
    return (y if x.shape[1] <= x.shape[2] else y.transpose(1, 2)).float()


RULES = {
    "eva-f": Rule(),
    "momentum behind": Rule(momentum_first=False),
    "no vectors": Rule(with_inputs=False),
    "squares of inputs": Rule(squares=True),
    "columns": Rule(columns=0.95),
    "balanced": Rule(balanced=2),
    "1 left": Rule(left=1),
    "3 left": Rule(left=3),
    "3 left, soft 0.3": Rule(left=3, soft=0.3),
    "6 left": Rule(left=6),
    "3 left, at least 0.1": Rule(left=3, least=0.1),
    "3 left, at least 0.3, not bound": Rule(left=3, least=0.3, bound=0.0),
    "1 left, at least 0.3": Rule(left=1, least=0.3),
    "3 left, at least 0.3": Rule(left=3, least=0.3),
    "3 left, lengths before": Rule(left=3, least=1.0),
    "1 right": Rule(right=1),
    "3 right": Rule(right=3),
    "inputs level": Rule(level_inputs=1.0),
    "1 left, level": Rule(left=1, level=1.0),
    "3 left, level": Rule(left=3, level=1.0),
    "3 left, level, inputs level": Rule(left=3, level=1.0, level_inputs=1.0),
    "8 left, level, inputs level": Rule(left=8, level=1.0, level_inputs=1.0),
    "16 left, level, inputs level": Rule(left=16, level=1.0, level_inputs=1.0),
    "16 left, level, no vectors": Rule(left=16, level=1.0, with_inputs=False),
    "orthogonal": Rule(orthogonal=True),
    "orthogonal, no vectors": Rule(orthogonal=True, with_inputs=False),
}
LENGTHS = {"cifar": 600, "text": 800, "autoencoder": 300}
RATES = {"cifar": 0.15, "text": 0.03, "autoencoder": 0.05}
BEHIND = {"cifar": 0.04, "text": 0.02, "autoencoder": 0.03}
DECAYS = {"cifar": 0.05, "text": 0.05, "autoencoder": 0.0}


def trials(arguments: argparse.Namespace) -> Iterator[tuple[str, str, float, int, int]]:
    """Task, rule, learning rate, seed and steps."""
    for seed in SEEDS:
        for task in arguments.task or LENGTHS:
            for name in arguments.rule or RULES:
                usual = (RATES if RULES[name].momentum_first else BEHIND)[task]
                for lr in arguments.lr or (usual,):
                    for steps in arguments.steps or (LENGTHS[task],):
                        yield task, name, lr, seed, steps


_tasks: dict[str, Any] = {}


def run(
    task: str, name: str, lr: float, seed: int, steps: int, data: Path, device: str, toy: bool, until: float
) -> Any:
    """The last row of a training, or None if it is not done in time."""
    torch.backends.cudnn.benchmark = True
    if task not in _tasks:
        _tasks[task] = TASKS[task](data, device, toy=toy)
    contender = Contender(
        lambda model, rate, _: [Tried(model, RULES[name], lr=rate, weight_decay=DECAYS[task])],
        (lr,),
    )
    rows = train(_tasks[task], contender, Trial(name, lr, 1, 4 if toy else steps, seed), device, until)
    return None if rows is None else rows[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--task", action="append", choices=tuple(LENGTHS), help="once for each; all unless given")
    parser.add_argument("--rule", action="append", choices=tuple(RULES), help="once for each; all unless given")
    parser.add_argument("--lr", action="append", type=float, help="once for each; the rule's unless given")
    parser.add_argument("--steps", action="append", type=int, help="once for each; the task's unless given")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--together", type=int, default=1, help="trials at a time")
    parser.add_argument("--toy", action="store_true", help="small networks and batches, to see that everything runs")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    known = {tuple(row[key] for key in ("task", "rule", "lr", "seed", "steps")) for row in read(arguments.results)}
    left = [one for one in trials(arguments) if tuple(map(str, one)) not in known]
    until = time.time() + 60 * arguments.minutes
    with ProcessPoolExecutor(arguments.together, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(run, *one, arguments.data, device, arguments.toy, until): one for one in left}
        for future in as_completed(running):
            task, name, lr, seed, steps = running[future]
            row = future.result()
            if row is not None:
                about = {"task": task, "rule": name, "lr": lr, "seed": seed, "steps": steps}
                found = {"train_loss": row["train_loss"], "test": row["test"]}
                append(arguments.results, [{**about, **found, **environment(torch.device(device))}])
            print(task, name, lr, seed, steps, row["test"] if row else "not done in time", flush=True)


if __name__ == "__main__":
    main()
