"""All ranks of a DASO training in one process, step by step, with nothing in the background.

Ranks of a node have the same weights, so that one model stands for a node; its gradient is the mean of what
its ranks would compute. Written from the formulas, for reading, not for speed.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Optimizer


class Node:
    """One node's model, optimizer and, during an exchange, the weights that it has sent."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, ranks: list[int]) -> None:
        self.model, self.optimizer, self.ranks = model, optimizer, ranks

    @property
    def x(self) -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.model.parameters()])

    @x.setter
    def x(self, vector: torch.Tensor) -> None:
        at = 0
        for p in self.model.parameters():
            p.data = vector[at : at + p.numel()].view_as(p).clone()
            at += p.numel()

    def gradient(self, loss_of: Callable[[nn.Module, int, int], torch.Tensor], step: int) -> None:
        """Return the mean of its ranks' gradients."""
        totals = [torch.zeros_like(p) for p in self.model.parameters()]
        for rank in self.ranks:
            gradients = torch.autograd.grad(loss_of(self.model, rank, step), list(self.model.parameters()))
            totals = [total + gradient for total, gradient in zip(totals, gradients, strict=True)]
        for p, total in zip(self.model.parameters(), totals, strict=True):
            p.grad = total / len(self.ranks)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def make_nodes(nodes: int, places: int, make_model: Callable, make_optimizer: Callable) -> list[Node]:
    made = []
    for node in range(nodes):
        model = make_model()
        made.append(Node(model, make_optimizer(model.parameters()), [node * places + place for place in range(places)]))
    return made


def simulate_delta(
    nodes: list[Node], loss_of: Callable, *, steps: int, every: int, wait: int, payload: torch.dtype
) -> list[list[torch.Tensor]]:
    """Return the weights of every node after every step."""
    anchor = nodes[0].x
    under_way: tuple[int, list[torch.Tensor]] | None = None
    seen = []

    def merge(sent: list[torch.Tensor]) -> None:
        nonlocal anchor
        mean = sum(sent).float() / len(nodes)
        anchor = anchor + mean
        for node, own in zip(nodes, sent, strict=True):
            node.x = node.x + (mean - own.float())

    for step in range(steps):
        for node in nodes:
            node.gradient(loss_of, step)
            node.step()
        if under_way is not None and step >= under_way[0] + wait:
            merge(under_way[1])
            under_way = None
        if step % every == 0:
            sent = [(node.x - anchor).to(payload) for node in nodes]
            if wait == 0:
                merge(sent)
            else:
                under_way = step, sent
        seen.append([node.x for node in nodes])
    return seen


def simulate_paper(
    nodes: list[Node],
    loss_of: Callable,
    *,
    epochs: int,
    epoch_steps: int,
    warm_up: int,
    cool_down: int,
    payload: torch.dtype,
    losses: list[float],
    most: int = 8,
) -> tuple[list[list[torch.Tensor]], list[tuple[int, int]]]:
    """Return weights after every step and epoch, and B and W in every epoch, by the published rules.

    ``losses`` stand for the loss of each epoch in the plateau rule.
    """
    b, w, best, bad = 4, 1, float("inf"), 0
    seen, rhythm, step = [], [], 0

    def average() -> None:
        total = sum(node.x.to(payload) for node in nodes)
        for node in nodes:
            node.x = total.float() / len(nodes)

    def merge(total: torch.Tensor, staleness: int) -> None:
        for node in nodes:
            node.x = (2 * staleness * node.x + total.float()) / (2 * staleness + len(nodes))

    for epoch in range(epochs):
        blocking = epoch < warm_up or epoch >= epochs - cool_down
        rhythm.append((b, w))
        under_way: tuple[int, torch.Tensor] | None = None

        for batch in range(epoch_steps):
            for node in nodes:
                node.gradient(loss_of, step)
                node.step()
            if blocking:
                average()
            else:
                earlier = under_way
                if batch % b == 0:
                    under_way = batch, sum(node.x.to(payload) for node in nodes)
                    if earlier is not None:
                        merge(earlier[1], w)
                elif earlier is not None and batch >= earlier[0] + w:
                    merge(earlier[1], w)
                    under_way = None
            seen.append([node.x for node in nodes])
            step += 1
        if under_way is not None:
            merge(under_way[1], w)
        average()
        seen.append([node.x for node in nodes])
        if not blocking:
            if losses[epoch] < 0.95 * best:
                best, bad = losses[epoch], 0
            else:
                bad += 1
            if bad > 2:
                bad = 0
                b, w = (b // 2, max(1, w - 1)) if b > 1 else (most, max(1, most // 4))
    return seen, rhythm
