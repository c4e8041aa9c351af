"""Training jobs to compare: a model, its data and its loss."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gradweave.compare.data import digits, images, token_sequences
from gradweave.compare.model_errors import errors_of_model, one_line
from gradweave.compare.models import GPT, MLP, Autoencoder, MobileNetV2, ResNet18
from gradweave.errors import ArgumentError

_STORED_BATCHES = 8
Batches = list[tuple[torch.Tensor, torch.Tensor]]
"""Inputs and targets of each batch."""
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Workload:
    """A training job.

    Attributes:
        name: The name in tables.
        make_model: Builds the model on the CPU; called under a fixed seed.
        make_data: Builds batches of inputs and targets from a batch size and a generator. The first dimension of the
            inputs counts the samples.
        loss: Loss of the model's output and the targets.
        default_batch: Default batch size.
        learning_rates: Default learning rates by optimizer, where the optimizer's usual one is far off.
    """

    name: str
    make_model: Callable[[], nn.Module]
    make_data: Callable[[int, torch.Generator], Batches]
    loss: Loss
    default_batch: int = 32
    learning_rates: Mapping[str, float] = field(default_factory=dict, hash=False)


def _cut(x: torch.Tensor, y: torch.Tensor, batch: int, generator: torch.Generator) -> Batches:
    """Return whole batches of shuffled samples."""
    if batch > len(x):
        raise ArgumentError("--batch", batch, f"there are only {len(x):,} samples; give at most that many")
    order = torch.randperm(len(x), generator=generator)
    batches = [order[i : i + batch] for i in range(0, len(order) - batch + 1, batch)]
    return [(x[chosen], y[chosen]) for chosen in batches]


def _wide_digits(batch: int, generator: torch.Generator) -> Batches:
    """Return digits with each pixel repeated, to 1,024 features."""
    pixels, labels = digits()
    return _cut(pixels.repeat_interleave(16, dim=1), labels, batch, generator)


def _digits_to_themselves(batch: int, generator: torch.Generator) -> Batches:
    pixels, _ = digits()
    return _cut(pixels, pixels, batch, generator)


def _images(shape: tuple[int, ...], classes: int) -> Callable[[int, torch.Generator], Batches]:
    return lambda batch, generator: [images(batch, shape, classes, generator) for _ in range(_STORED_BATCHES)]


def _tokens(length: int, vocabulary: int) -> Callable[[int, torch.Generator], Batches]:
    def make(batch: int, generator: torch.Generator) -> Batches:
        rows = token_sequences(batch * _STORED_BATCHES, length + 1, vocabulary, generator)
        return [(part[:, :-1], part[:, 1:]) for part in rows.split(batch)]

    return make


def class_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy over the last dimension of logits, in float32."""
    return functional.cross_entropy(output.flatten(0, -2).float(), target.flatten())


def _pixel_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.binary_cross_entropy_with_logits(output.float(), target.float())


def _small_gpt() -> nn.Module:
    return GPT(vocabulary=512, width=128, blocks=4, heads=4, tokens=64)


# The best of a coarse grid (half decades) after 166 steps, one seed: defaults that train, not the result of a contest.
_MLP_RATES = {
    "sgd": 0.1, "adam": 1e-4, "adamw": 1e-4, "nadam": 1e-4, "rmsprop": 1e-4, "adagrad": 1e-2,
}  # fmt: skip
_AUTOENCODER_RATES = {
    "sgd": 0.1, "adam": 3e-3, "adamw": 3e-3, "nadam": 3e-3, "rmsprop": 3e-4, "adagrad": 3e-3, "adadelta": 3.0,
}  # fmt: skip
_SMALL_GPT_RATES = {"sgd": 0.1, "adam": 3e-3, "adamw": 3e-3, "nadam": 3e-3}

WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("mlp", MLP, _wide_digits, class_loss, learning_rates=_MLP_RATES),
        Workload("autoencoder", Autoencoder, _digits_to_themselves, _pixel_loss, 64, _AUTOENCODER_RATES),
        Workload("mobilenet_v2", MobileNetV2, _images((3, 224, 224), 1000), class_loss),
        Workload("resnet18", ResNet18, _images((3, 224, 224), 1000), class_loss),
        Workload("gpt_small", _small_gpt, _tokens(64, 512), class_loss, 8, _SMALL_GPT_RATES),
        Workload("gpt2", GPT, _tokens(1024, 50304), class_loss, 2),
    )
}


def find_workload(name: str) -> Workload:
    """Return a built-in workload, that of ``package.module:factory``, or a model of torchvision, timm or transformers.

    A factory takes no arguments and returns a :class:`Workload`, or an image classifier.
    """
    if name in WORKLOADS:
        return WORKLOADS[name]
    home, _, what = name.partition(":")
    if not what:
        known = ", ".join(WORKLOADS)
        remedy = f"use one of {known}; package.module:factory; or a name after torchvision:, timm: or transformers:"
        raise ArgumentError("--model", name, remedy)
    if home == "transformers":
        return _from_transformers(name, what)
    if home in ("torchvision", "timm"):
        return _from_image_library(name, home, what)
    try:
        made = getattr(_imported(name, home), what)
    except AttributeError:
        raise ArgumentError("--model", name, f"{home} has no {what}") from None
    return _from_factory(name, made)


def _imported(name: str, home: str) -> Any:
    """Import a module by its full name; errors of its own code are reported as such."""
    if not all(part.isidentifier() for part in home.split(".")):
        raise ArgumentError("--model", name, f"{home!r} is not the name of a module; write package.module:factory")
    try:
        with errors_of_model(name, f"{home} fails when imported", "--model"):
            return importlib.import_module(home)
    except ArgumentError as error:
        if isinstance(error.__cause__, ImportError):
            raise ArgumentError("--model", name, f"cannot be imported: {one_line(error.__cause__)}") from None
        raise


def _from_factory(name: str, factory: Any) -> Workload:
    if not callable(factory):
        raise ArgumentError("--model", name, "is not callable; name a function without arguments")
    with errors_of_model(name, "failed when called", "--model"):
        made = factory()
    if isinstance(made, Workload):
        return made
    if isinstance(made, nn.Module):
        return Workload(name, factory, _images((3, 224, 224), _classes(name, made)), class_loss)
    raise ArgumentError("--model", name, f"returned {type(made).__name__}; return a Workload or an image classifier")


def _classes(name: str, model: nn.Module) -> int:
    with (
        errors_of_model(name, "does not classify images of 3 x 224 x 224; return a Workload instead", "--model"),
        torch.no_grad(),
    ):
        return int(model.eval()(torch.zeros(1, 3, 224, 224)).shape[-1])


def _from_image_library(name: str, home: str, what: str) -> Workload:
    if home == "timm":
        timm = _imported(name, "timm")
        return _from_factory(name, lambda: timm.create_model(what))
    models = _imported(name, "torchvision.models")
    return _from_factory(name, lambda: models.get_model(what))


def _from_transformers(name: str, what: str) -> Workload:
    transformers = _imported(name, "transformers")
    with errors_of_model(name, "transformers cannot make its configuration", "--model"):
        config = transformers.AutoConfig.for_model(what)
        vocabulary = int(config.vocab_size)

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = transformers.AutoModelForCausalLM.from_config(config)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.model(input_ids=tokens, use_cache=False).logits
            return logits

    return Workload(name, Logits, _tokens(256, vocabulary), class_loss, 4)
