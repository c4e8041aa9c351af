"""The training steps that every claim of speed on one GPU is tried on, and toys of them for machines without one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from stock import STOCK, Batch, LossFn, OptimizerName
from torch import Tensor, nn
from torch.nn import functional

from gradweave.compare.models import GPT, MLP

OURS = ("gradweave.compile", "gradweave.fuse")
_LARGE = ("compile_reduce_overhead", "compile_max_autotune", "graph_compile", "graph_max_autotune", "whole")
_WIDE = ("eager", *_LARGE)
_GPT = (*STOCK, "whole_max_autotune", "jax")
_TOY = ("eager", "compile", "whole")


@dataclass(frozen=True)
class Workload:
    """A model, its data, its loss and its optimizer.

    Attributes:
        name: Of its rows.
        make_model: Makes the model.
        draw: Draws a batch.
        loss_fn: Called as ``loss_fn(model, *batch)``.
        optimizer: Which of ``stock.make_optimizer``.
        gib: Memory that a process of it needs, at most.
        stock: Steps of torch (and JAX) that are tried; where memory or time leaves out some, the fastest stay.
        ours: Steps of ours.
        steps: Steps in a round.
        on_cpu: Whether it is a toy.
    """

    name: str
    make_model: Callable[[], nn.Module]
    draw: Callable[[], Batch]
    loss_fn: LossFn
    optimizer: OptimizerName = "adamw"
    gib: int = 8
    stock: tuple[str, ...] = STOCK
    steps: int = 20
    ours: tuple[str, ...] = OURS
    on_cpu: bool = field(default=False, kw_only=True)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.on_cpu else "cuda")

    @property
    def variants(self) -> tuple[str, ...]:
        return (*self.stock, *self.ours)

    def model(self) -> nn.Module:
        """Make the model where it is to be, with the same weights in every process."""
        torch.manual_seed(0)
        with self.device:
            return self.make_model().train()

    def batches(self, count: int = 4) -> list[Batch]:
        torch.manual_seed(1)
        return [tuple(x.to(self.device) for x in self.draw()) for _ in range(count)]


def logits_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast(x.device.type, torch.bfloat16):
        output = model(x)
        logits = getattr(output, "logits", output)
        return functional.cross_entropy(logits.flatten(0, -2).float(), y.flatten())


def masks_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast(x.device.type, torch.bfloat16):
        return functional.cross_entropy(model(x).float(), y)


def labels_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Leave the loss to the model, as users of transformers do."""
    with torch.autocast(x.device.type, torch.bfloat16):
        loss: Tensor = model(input_ids=x, labels=y).loss
        return loss


def nodes_loss(model: nn.Module, x: Tensor, edges: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(model(x, edges), y)


def draw_tokens(rows: int, length: int, vocabulary: int = 50304, *, shifted: bool = True) -> Callable[[], Batch]:
    def draw() -> Batch:
        tokens = torch.randint(vocabulary, (rows, length + shifted))
        return (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()) if shifted else (tokens, tokens.clone())

    return draw


def draw_images(count: int, size: int = 224, classes: int = 1000, *, masks: bool = False) -> Callable[[], Batch]:
    def draw() -> Batch:
        images = torch.randn(count, 3, size, size).to(memory_format=torch.channels_last)
        return images, torch.randint(classes, (count, size, size) if masks else (count,))

    return draw


def draw_graph(nodes: int, edges: int, width: int, classes: int) -> Callable[[], Batch]:
    return lambda: (torch.randn(nodes, width), torch.randint(nodes, (2, edges)), torch.randint(classes, (nodes,)))


def large_gpt() -> nn.Module:
    return GPT(width=2048, blocks=14, heads=16)


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=2048, use_cache=False
    )
    return LlamaForCausalLM(config)


def gpt2_of_transformers() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False))


def of_timm(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import timm

        model: nn.Module = timm.create_model(name)
        return model.to(memory_format=torch.channels_last)

    return make


def of_torchvision(name: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import torchvision

        model: nn.Module = torchvision.models.get_model(name, **options)
        return model.to(memory_format=torch.channels_last)

    return make


class UNet(nn.Module):
    """The network of Ronneberger et al. (2015) with batch normalization.

    Args:
        width: Channels of the first level; they double with each.
        levels: How often the image is halved.
        classes: Of a pixel.
    """

    def __init__(self, *, width: int = 64, levels: int = 4, classes: int = 2) -> None:
        super().__init__()
        widths = [width << level for level in range(levels + 1)]
        self.down = nn.ModuleList(_pair(a, b) for a, b in pairwise([3, *widths[:-1]]))
        self.bottom = _pair(widths[-2], widths[-1])
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in reversed(widths[:-1]))
        self.merge = nn.ModuleList(_pair(2 * w, w) for w in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.down:
            x = layer(x)
            kept.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.bottom(x)
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([kept.pop(), up(x)], 1))
        out: Tensor = self.head(x)
        return out


def _pair(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
    )  # fmt: skip


class LanguageLSTM(nn.Module):
    """A language model of stacked LSTMs, with cuDNN's kernels on a GPU."""

    def __init__(self, vocabulary: int = 10000, width: int = 1024, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(self.embedding(x))[0])
        return out


def graph_network() -> nn.Module:
    from torch_geometric.nn import GATConv, GCNConv

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = GCNConv(128, 256)
            self.second = GATConv(256, 64, heads=4)
            self.head = nn.Linear(256, 40)

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            x = functional.relu(self.first(x, edges))
            out: Tensor = self.head(functional.elu(self.second(x, edges)))
            return out

    return Network()


def _small_gpt() -> nn.Module:
    return GPT(vocabulary=64, width=32, blocks=1, heads=2, tokens=16)


def _unet_pixels(count: int, size: int) -> Callable[[], Batch]:
    return draw_images(count, size, classes=2, masks=True)


_SUITE = [
    Workload("gpt2-2x1024", GPT, draw_tokens(2, 1024), logits_loss, gib=6, stock=_GPT),
    Workload("gpt2-8x1024", GPT, draw_tokens(8, 1024), logits_loss, gib=9, stock=_GPT),
    Workload("gpt2-32x1024", GPT, draw_tokens(32, 1024), logits_loss, gib=21, stock=_LARGE[1:], ours=OURS[:1], steps=6),
    Workload("gpt-0.9b-1x512", large_gpt, draw_tokens(1, 512), logits_loss, gib=15, stock=_WIDE),
    Workload("gpt-0.9b-1x1024", large_gpt, draw_tokens(1, 1024), logits_loss, gib=15, stock=_WIDE),
    Workload("bert-base-32x128", bert, draw_tokens(32, 128, 30522), logits_loss, gib=6),
    Workload("llama-12x768-4x1024", llama, draw_tokens(4, 1024, 32000), logits_loss, gib=7),
    Workload(
        "gpt2-of-transformers-4x1024", gpt2_of_transformers, draw_tokens(4, 1024, 50257, shifted=False), labels_loss
    ),
    Workload("vit-b16-32", of_timm("vit_base_patch16_224"), draw_images(32), logits_loss, gib=5),
    Workload("convnext-t-32", of_timm("convnext_tiny"), draw_images(32), logits_loss, gib=5),
    Workload("resnet50-32", of_torchvision("resnet50"), draw_images(32), logits_loss, "sgd", gib=4),
    Workload(
        "mobilenet-v2-32", of_torchvision("mobilenet_v2", dropout=0.0), draw_images(32), logits_loss, "sgd", gib=4
    ),
    Workload("efficientnet-b0-64", of_timm("efficientnet_b0"), draw_images(64), logits_loss, gib=7),
    Workload("unet-16x256", UNet, _unet_pixels(16, 256), masks_loss, gib=9),
    Workload("lstm-2x1024-32x128", LanguageLSTM, draw_tokens(32, 128, 10000), logits_loss, gib=3),
    Workload("gcn-gat-10000", graph_network, draw_graph(10_000, 100_000, 128, 40), nodes_loss, gib=3),
]
_TOYS = [
    Workload("toy-gpt", _small_gpt, draw_tokens(2, 16, 64), logits_loss, stock=_TOY, on_cpu=True),
    Workload(
        "toy-mlp", lambda: MLP(width=16, depth=2, classes=4),
        lambda: (torch.randn(8, 16), torch.randint(4, (8,))), logits_loss, "sgd", stock=_TOY, on_cpu=True,
    ),
    Workload(
        "toy-unet", lambda: UNet(width=4, levels=2), _unet_pixels(2, 16), masks_loss, stock=_TOY, on_cpu=True
    ),
    Workload(
        "toy-lstm", lambda: LanguageLSTM(32, 16, 1), draw_tokens(2, 8, 32), logits_loss, stock=_TOY, on_cpu=True
    ),
]  # fmt: skip
SUITE = {workload.name: workload for workload in _SUITE}
TOYS = {workload.name: workload for workload in _TOYS}
WORKLOADS = {**SUITE, **TOYS}
