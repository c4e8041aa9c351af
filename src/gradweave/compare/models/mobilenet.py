"""MobileNetV2 (Sandler et al. 2018)."""

from __future__ import annotations

import torch
from torch import nn

_STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
"""Expansion, channels, repeats and first stride of each stage."""


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [convolution, nn.BatchNorm2d(outputs), nn.ReLU6()]


class _InvertedResidual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        layers = _conv(inputs, hidden, 1) if expansion != 1 else []
        layers += _conv(hidden, hidden, 3, stride, groups=hidden)
        layers += _conv(hidden, outputs, 1)[:2]
        self.body = nn.Sequential(*layers)
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x)
        return x + out if self.residual else out


class MobileNetV2(nn.Sequential):
    """The network as in torchvision, parameter for parameter."""

    def __init__(self, classes: int = 1000) -> None:
        layers = _conv(3, 32, 3, 2)
        inputs = 32
        for expansion, channels, repeats, first_stride in _STAGES:
            for number in range(repeats):
                layers.append(_InvertedResidual(inputs, channels, first_stride if number == 0 else 1, expansion))
                inputs = channels
        layers += _conv(inputs, 1280, 1)
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(1280, classes))
