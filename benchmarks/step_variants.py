"""Training steps to compare ``gradweave.compile`` with: workloads, and ways to take a step of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

import gradweave
from gradweave.compare.data import token_sequences
from gradweave.compare.models import GPT

CUDA = torch.device("cuda")


@dataclass(frozen=True)
class Workload:
    """A model and its batches, the same for all variants.

    Attributes:
        flops: That a step must do.
        update_bytes: That an update must move: weights, gradients and optimizer state, in and out.
    """

    name: str
    make_model: Callable[[], nn.Module]
    make_batch: Callable[[torch.Generator], tuple[torch.Tensor, torch.Tensor]]
    optimizer: str
    flops: float
    update_bytes: float
    variants: tuple[str, ...]

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make_model().to(CUDA)

    def batches(self, count: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(0)
        return [tuple(x.to(CUDA) for x in self.make_batch(generator)) for _ in range(count)]  # type: ignore[misc]


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        output = model(x)
    return functional.cross_entropy(output.flatten(0, -2).float(), y.flatten())


def tokens(rows: int, length: int = 1024) -> Callable[[torch.Generator], tuple[torch.Tensor, torch.Tensor]]:
    def make(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        made = token_sequences(rows, length + 1, 50304, generator)
        return made[:, :-1].contiguous(), made[:, 1:].contiguous()

    return make


def images(count: int) -> Callable[[torch.Generator], tuple[torch.Tensor, torch.Tensor]]:
    def make(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(count, 3, 224, 224, generator=generator).contiguous(memory_format=torch.channels_last)
        return x, torch.randint(0, 1000, (count,), generator=generator)

    return make


def from_torchvision(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import torchvision

        model: nn.Module = torchvision.models.get_model(name)
        return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]

    return make


_ALL = ("eager", "compile_ro", "graph_compile", "step", "step_clip")
_GPT = 6 * 124e6 * 2048 + 12 * 12 * 768 * 1024 * 2048
WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("gpt2-2x1024", GPT, tokens(2), "adamw", _GPT, 26 * 163e6, (*_ALL, "jax")),
        Workload("mobilenet_v2-32", from_torchvision("mobilenet_v2"), images(32), "adamw", 58e9, 28 * 3.5e6, _ALL),
        Workload("resnet50-32", from_torchvision("resnet50"), images(32), "sgd", 785e9, 20 * 25.6e6, _ALL),
        Workload("gpt2-8x1024", GPT, tokens(8), "adamw", 4 * _GPT, 26 * 163e6, (*_ALL[1:], "jax")),
    )
}


def make_optimizer(name: str, model: nn.Module, **form: bool) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-4, **form)
    form.pop("capturable", None)
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, **form)


Batch = tuple[torch.Tensor, torch.Tensor]


def make_variant(name: str, workload: Workload) -> Callable[[Batch], torch.Tensor]:
    """A function that takes one training step."""
    model = workload.model().train()
    if name == "jax":
        from jax_gpt import train_with_jax

        return train_with_jax(model, lr=1e-4)
    if name.startswith("step"):
        optimizer = make_optimizer(workload.optimizer, model)
        step = gradweave.compile(model, loss_of, optimizer, max_grad_norm=1.0 if name == "step_clip" else None)
        return lambda batch: step(*batch)
    capturable = name == "graph_compile"
    form = {"foreach": True} if name == "eager" else {"fused": True, "capturable": capturable}
    optimizer = make_optimizer(workload.optimizer, model, **form)
    mode = {"compile_ro": "reduce-overhead", "graph_compile": "default"}.get(name)
    forward = model if mode is None else torch.compile(model, mode=mode)
    train = stock_step(forward, optimizer)
    return captured(train) if capturable else lambda batch: train(*batch)


def stock_step(forward: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., torch.Tensor]:
    """The training step as one writes it."""

    def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = loss_of(forward, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return train


def captured(train: Callable[..., torch.Tensor], *, priority: int = 0) -> Callable[[Batch], torch.Tensor]:
    """The whole step in one CUDA graph, captured at the fourth call, on a stream of a priority."""
    static: list[torch.Tensor] = []
    graph = torch.cuda.CUDAGraph()
    result: list[torch.Tensor] = []
    calls = 0

    def call(batch: Batch) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls <= 3:
            side = torch.cuda.Stream(priority=priority)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                loss = train(*batch)
            torch.cuda.current_stream().wait_stream(side)
            return loss
        if not result:
            static.extend(x.clone() for x in batch)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=torch.cuda.Stream(priority=priority)):
                result.append(train(*static))
        for there, x in zip(static, batch, strict=True):
            there.copy_(x)
        graph.replay()
        return result[0].clone()

    return call
