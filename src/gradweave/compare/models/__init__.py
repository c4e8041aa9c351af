"""Small, plain versions of well-known networks, for comparisons without further packages."""

from __future__ import annotations

from gradweave.compare.models.autoencoder import Autoencoder
from gradweave.compare.models.gpt import GPT
from gradweave.compare.models.mlp import MLP
from gradweave.compare.models.mobilenet import MobileNetV2
from gradweave.compare.models.resnet import ResNet18

__all__ = ["GPT", "MLP", "Autoencoder", "MobileNetV2", "ResNet18"]
