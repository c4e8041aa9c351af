"""Small, plain versions of well-known networks, for comparisons that need nothing installed."""

from __future__ import annotations

from gradweave.zoo.autoencoder import Autoencoder
from gradweave.zoo.gpt import GPT
from gradweave.zoo.mlp import MLP
from gradweave.zoo.mobilenet import MobileNetV2
from gradweave.zoo.resnet import ResNet18

__all__ = ["GPT", "MLP", "Autoencoder", "MobileNetV2", "ResNet18"]
