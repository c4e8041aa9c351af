"""Data for comparisons: a small real data set, part of the package, and data generated to shape."""

from __future__ import annotations

import gzip
from importlib.resources import files

import torch

_PIXELS = 64


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return 1,797 handwritten digits: 64 pixels between 0 and 1, and the class.

    The test part of the "Optical Recognition of Handwritten Digits" data of the UCI repository, by
    E. Alpaydin and C. Kaynak, as scikit-learn ships it.
    """
    raw = gzip.decompress(files("gradweave.compare").joinpath("digits.bin.gz").read_bytes())
    table = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(-1, _PIXELS + 1)
    return table[:, :_PIXELS].float() / 16.0, table[:, _PIXELS].long()


def images(
    count: int, shape: tuple[int, ...], classes: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return noise with a class-dependent mean, so that there is something to learn, and the classes."""
    labels = torch.randint(0, classes, (count,), generator=generator)
    pictures = torch.randn(count, *shape, generator=generator)
    return pictures + (labels.float() / classes - 0.5).view(-1, *(1 for _ in shape)), labels


def token_sequences(count: int, length: int, vocabulary: int, generator: torch.Generator) -> torch.Tensor:
    """Return sequences in which most tokens follow from the one before."""
    follows = torch.randperm(vocabulary, generator=generator)
    tokens = torch.randint(0, vocabulary, (count, length), generator=generator)
    is_random = torch.rand(count, length, generator=generator) < 0.2
    for place in range(1, length):
        tokens[:, place] = torch.where(is_random[:, place], tokens[:, place], follows[tokens[:, place - 1]])
    return tokens
