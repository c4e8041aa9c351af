"""A multilayer perceptron."""

from __future__ import annotations

from torch import nn


class MLP(nn.Sequential):
    """``depth`` layers of ``width`` with ReLU, and a linear head."""

    def __init__(self, *, width: int = 1024, depth: int = 8, classes: int = 10) -> None:
        layers: list[nn.Module] = []
        for _ in range(depth):
            layers += [nn.Linear(width, width), nn.ReLU()]
        super().__init__(*layers, nn.Linear(width, classes))
