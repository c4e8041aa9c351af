"""The deep autoencoder of Hinton and Salakhutdinov, at the size of a small image."""

from __future__ import annotations

from itertools import pairwise

from torch import nn

WIDTHS = (64, 512, 256, 64, 16)


class Autoencoder(nn.Sequential):
    """Encoder and mirrored decoder of linear layers; gives logits of pixel intensities."""

    def __init__(self, widths: tuple[int, ...] = WIDTHS) -> None:
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise((*widths, *widths[-2::-1])):
            layers += [nn.Linear(inputs, outputs), nn.ELU()]
        super().__init__(*layers[:-1])
