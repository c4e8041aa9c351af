"""The tasks on which optimizers are compared: an autoencoder, a ResNet with BatchNorm, a small GPT, on real data.

The data folder holds ``mnist.npz``, ``cifar10.npz.xz`` (JPEG bytes and their lengths) and ``tinyshakespeare.txt``.
"""

from __future__ import annotations

import io
import lzma
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from likelihoods import CrossEntropy, Likelihood, SquaredError
from torch import nn

from gradweave.compare.data import digits
from gradweave.compare.models import GPT, Autoencoder

Batch = tuple[torch.Tensor, ...]

HELD_OUT = 5000
"""Pictures of handwritten digits that are held out of the training data, for choices."""


@dataclass(frozen=True)
class Task:
    """Something to train.

    Attributes:
        make_model: On the device, from the global seed.
        batch: The batch of a step, drawn with a generator.
        loss: Of a model and a batch.
        test: A figure of a model on data it was not trained on.
        metric: What that figure is.
        lengths: Numbers of steps that schedules are tried with; the first is the one rates are chosen with.
        lower_is_better: Whether the figure is to be small.
        points: How often a trial is tested.
        validate: As ``test``, on data that was held out of what is trained on, for choices; only where that was asked.
        likelihood: The loss, by outputs and targets.
        forward: Outputs of a callable model, as the loss takes them.
    """

    make_model: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    loss: Callable[..., torch.Tensor]
    test: Callable[[nn.Module], float]
    metric: str
    lengths: tuple[int, ...]
    lower_is_better: bool = True
    points: int = 12
    validate: Callable[[nn.Module], float] | None = None
    likelihood: Likelihood = field(default_factory=SquaredError)
    forward: Callable[[Callable[..., Any], torch.Tensor], torch.Tensor] = lambda call, x: call(x)


def _pick(count: int, size: int, generator: torch.Generator, device: str) -> torch.Tensor:
    return torch.randint(0, count, (size,), generator=generator).to(device)


def _half(device: str) -> torch.autocast:
    return torch.autocast(device, torch.bfloat16, enabled=device == "cuda")


def autoencoder(data: Path, device: str, *, toy: bool, hold_out: bool = False) -> Task:
    """784-1000-500-250-30 and back, ReLU, linear code, mean squared error of normalized pixels."""
    arrays = np.load(data / "mnist.npz")
    train, test = (
        torch.from_numpy(arrays[key]).reshape(-1, 784).float().div(255).to(device) for key in ("x_train", "x_test")
    )
    mean, std = train.mean(), train.std()
    train, test = (train - mean) / std, (test - mean) / std
    held_out = train[-HELD_OUT:]
    train = train[:-HELD_OUT] if hold_out else train
    widths = (784, 1000, 500, 250, 30)
    batch = 250 if toy else 1000

    def make_model() -> nn.Module:
        layers: list[nn.Module] = []
        for number, (inputs, outputs) in enumerate(pairwise((*widths, *widths[-2::-1]))):
            layers += [nn.Linear(inputs, outputs)] + ([] if number in (3, 7) else [nn.ReLU()])
        return nn.Sequential(*layers).to(device)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (model(x) - x).square().mean()

    def error(model: nn.Module, of: torch.Tensor) -> float:
        return float(sum(loss(model, part) * len(part) for part in of.split(2500)) / len(of))

    return Task(
        make_model,
        lambda generator: (train[_pick(len(train), batch, generator, device)],),
        loss,
        lambda model: error(model, test),
        "test mean squared error",
        (300, 150, 600),
        validate=(lambda model: error(model, held_out)) if hold_out else None,
        likelihood=SquaredError(elements=784),
    )


def small(data: Path | None, device: str, *, toy: bool, hold_out: bool = False) -> Task:  # noqa: ARG001
    """The autoencoder of the package's own comparison, 64-512-256-64-16 and back, on the digits that come along."""
    pixels = digits()[0]
    pixels = pixels[torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))].to(device)
    pixels = (pixels - pixels.mean()) / pixels.std()
    test, held_out = pixels[:300], pixels[300:600]
    train = pixels[600:] if hold_out else pixels[300:]

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (model(x) - x).square().mean()

    return Task(
        lambda: Autoencoder().to(device),
        lambda generator: (train[_pick(len(train), 250, generator, device)],),
        loss,
        lambda model: float(loss(model, test)),
        "test mean squared error",
        (200,),
        validate=(lambda model: float(loss(model, held_out))) if hold_out else None,
        likelihood=SquaredError(elements=64),
    )


class Block(nn.Module):
    """Two convolutions and a shortcut, as CIFAR's ResNets have them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(out)) + self.shortcut(x))


class Residual(nn.Module):
    """A module's output, added to its input."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)  # type: ignore[no-any-return]


class Scaled(nn.Module):
    """A multiple of its input."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def _convolution(inputs: int, outputs: int, *behind: nn.Module) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(), *behind]


def resnet9(width: int) -> nn.Module:
    """A shallow, wide ResNet, as it is trained where few epochs are to do; what it gives is scaled down for SGD."""
    half, pool = [2 * width, 4 * width, 8 * width], nn.MaxPool2d(2)
    return nn.Sequential(
        *_convolution(3, width),
        *_convolution(width, half[0], pool),
        Residual(*_convolution(half[0], half[0]), *_convolution(half[0], half[0])),
        *_convolution(half[0], half[1], pool),
        *_convolution(half[1], half[2], pool),
        Residual(*_convolution(half[2], half[2]), *_convolution(half[2], half[2])),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(half[2], 10, bias=False),
        Scaled(0.125),
    )


def _images(data: Path, which: str, count: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures and labels; all of them are kept beside the data once they are decoded, for other processes."""
    kept = data / f"cifar10-{which}.npz"
    if count is None and kept.exists():
        arrays = np.load(kept)
        return torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["y"])
    pictures, labels = _decoded(data, which, count)
    if count is None:
        np.savez(kept, x=pictures.numpy(), y=labels.numpy())
    return pictures, labels


def _decoded(data: Path, which: str, count: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    from PIL import Image

    with lzma.open(data / "cifar10.npz.xz") as file:
        arrays = np.load(io.BytesIO(file.read()))
    stream, lengths = arrays[f"jpeg_{which}"].tobytes(), arrays[f"len_{which}"][:count]
    ends = np.cumsum(lengths)

    def decoded(place: tuple[int, int]) -> Any:
        end, length = place
        return np.asarray(Image.open(io.BytesIO(stream[end - length : end])).convert("RGB"))

    pictures = [decoded(place) for place in zip(ends.tolist(), lengths.tolist(), strict=True)]
    labels = torch.from_numpy(arrays[f"y_{which}"][:count].astype(np.int64).reshape(-1))
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).contiguous(), labels


def cifar(data: Path, device: str, *, toy: bool, hold_out: bool = False) -> Task:
    """A ResNet of eight convolutions, with crops and flips, batch 512; bf16 by autocast on a GPU."""
    count, width, size = (200, 4, 16) if toy else (None, 48, 512)
    (x, y), (test_x, test_y) = (_images(data, which, count) for which in ("train", "test"))
    x, y, test_x, test_y = (tensor.to(device) for tensor in (x, y, test_x, test_y))
    count_held = len(x) // 10 if hold_out else 0
    x, held_x = x[: len(x) - count_held], x[len(x) - count_held :]
    y, held_y = y[: len(y) - count_held], y[len(y) - count_held :]
    mean = torch.tensor([0.4914, 0.4822, 0.4465], device=device).view(1, 3, 1, 1)
    std = torch.tensor([0.247, 0.2435, 0.2616], device=device).view(1, 3, 1, 1)

    def normalized(pictures: torch.Tensor) -> torch.Tensor:
        return (pictures.float() / 255 - mean) / std

    def make_model() -> nn.Module:
        return resnet9(width).to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]

    def batch(generator: torch.Generator) -> Batch:
        chosen = _pick(len(x), size, generator, device)
        pictures = F.pad(normalized(x[chosen]), (4, 4, 4, 4))
        flips = torch.rand(size, generator=generator).to(device) < 0.5
        pictures = torch.where(flips[:, None, None, None], pictures.flip(3), pictures)
        rows, columns = (torch.randint(0, 9, (size, 1), generator=generator).to(device) for _ in range(2))
        span = torch.arange(32, device=device)
        index = torch.arange(size, device=device)[:, None, None]
        cropped = pictures.permute(0, 2, 3, 1)[index, (rows + span)[:, :, None], (columns + span)[:, None]]
        return cropped.permute(0, 3, 1, 2), y[chosen]

    def forward(call: Callable[..., Any], pictures: torch.Tensor) -> torch.Tensor:
        with _half(device):
            return call(pictures).float()  # type: ignore[no-any-return]

    def loss(model: nn.Module, pictures: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(forward(model, pictures), labels, label_smoothing=0.1)

    def outputs(model: nn.Module, pictures: torch.Tensor) -> torch.Tensor:
        """Of pictures and their mirror images, added up."""
        both = (pictures.contiguous(memory_format=torch.channels_last) for pictures in (pictures, pictures.flip(3)))
        return sum(model(one).float() for one in both)  # type: ignore[return-value]

    def accuracy(model: nn.Module, of: torch.Tensor, are: torch.Tensor) -> float:
        with _half(device):
            right = sum(
                (outputs(model, normalized(part)).argmax(1) == labels).sum()
                for part, labels in zip(of.split(2000), are.split(2000), strict=True)
            )
        return float(right) / len(are)

    lengths = (4,) if toy else (600, 1000, 1600, 2400)
    return Task(
        make_model,
        batch,
        loss,
        lambda model: accuracy(model, test_x, test_y),
        "test accuracy",
        lengths,
        lower_is_better=False,
        points=8,
        validate=(lambda model: accuracy(model, held_x, held_y)) if hold_out else None,
        likelihood=CrossEntropy(label_smoothing=0.1),
        forward=forward,
    )


def text(data: Path, device: str, *, toy: bool, hold_out: bool = False) -> Task:
    """A GPT over the bytes of a text, of which the last tenth is the test; bf16 by autocast on a GPU."""
    codes = torch.frombuffer(bytearray((data / "tinyshakespeare.txt").read_bytes()), dtype=torch.uint8).long()
    codes = codes.to(device)
    split = len(codes) * 9 // 10
    train, test = codes[:split], codes[split:]
    held = len(train) // 20
    held_out = train[-held:]
    train = train[:-held] if hold_out else train
    size, length, width, blocks = (4, 16, 16, 1) if toy else (64, 128, 256, 4)

    def rows(source: torch.Tensor, places: torch.Tensor) -> Batch:
        taken = source[places[:, None] + torch.arange(length + 1, device=device)]
        return taken[:, :-1].contiguous(), taken[:, 1:].contiguous()

    def forward(call: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
        with _half(device):
            return call(x).float()  # type: ignore[no-any-return]

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(forward(model, x).flatten(0, 1), y.flatten())

    def loss_on(model: nn.Module, source: torch.Tensor) -> float:
        places = torch.arange(0, len(source) - length - 1, length, device=device)
        parts = places.split(16 if toy else 256)[: 1 if toy else None]
        return float(sum(loss(model, *rows(source, part)) * len(part) for part in parts) / sum(map(len, parts)))

    def batch(generator: torch.Generator) -> Batch:
        return rows(train, _pick(len(train) - length - 1, size, generator, device))

    def make_model() -> nn.Module:
        return GPT(vocabulary=256, width=width, blocks=blocks, heads=4, tokens=length).to(device)

    return Task(
        make_model,
        batch,
        loss,
        lambda model: loss_on(model, test),
        "test loss",
        (4,) if toy else (800, 500, 1200),
        validate=(lambda model: loss_on(model, held_out)) if hold_out else None,
        likelihood=CrossEntropy(),
        forward=forward,
    )


TASKS: dict[str, Any] = {"autoencoder": autoencoder, "cifar": cifar, "text": text, "small": small}
