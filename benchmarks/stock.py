"""The best training steps that one can write with torch alone: what our steps are compared with.

Each takes any model, loss function and batch. Wherever a model is compiled, its loss is compiled with it, since whoever
compiles a model for its speed compiles its loss too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

Batch = Sequence[Tensor]
LossFn = Callable[..., Tensor]
Step = Callable[[Batch], Any]
OptimizerName = Literal["adamw", "sgd"]

MODES = {
    "compile": "default",
    "compile_reduce_overhead": "reduce-overhead",
    "compile_max_autotune": "max-autotune",
    "graph_compile": "default",
    "graph_max_autotune": "max-autotune-no-cudagraphs",
}
"""What ``torch.compile`` is told, by variant: the graphs of the last two are captured with the update behind them."""
WHOLE_MODES = {"whole": "default", "whole_max_autotune": "max-autotune-no-cudagraphs"}
STOCK = ("eager", *MODES, "graph", "whole")
LEARNING_RATES = {"adamw": 1e-4, "sgd": 1e-3}
MOMENTUM, BETAS, EPS, DECAY = 0.9, (0.9, 0.999), 1e-8, 1e-2
WARM_UPS = 3


def make_stock(name: str, model: nn.Module, loss_fn: LossFn, optimizer: OptimizerName) -> Step:
    """Make a function that takes one training step.

    Args:
        name: One of :data:`STOCK`, or ``whole_max_autotune``:

            - ``eager``: eager forward and backward, a fused update;
            - ``compile``, ``compile_reduce_overhead``, ``compile_max_autotune``: model and loss compiled, a fused
              update;
            - ``graph``: the eager step in one CUDA graph;
            - ``graph_compile``, ``graph_max_autotune``: model and loss compiled, and the update, in one CUDA graph;
            - ``whole``, ``whole_max_autotune``: forward, loss, backward and update as one compiled function, in one
              CUDA graph.
        model: On its device, in training mode.
        loss_fn: Called as ``loss_fn(model, *batch)``.
        optimizer: Which; its learning rate is of :data:`LEARNING_RATES`.
    """
    if any(isinstance(module, nn.RNNBase) for module in model.modules()):
        torch._dynamo.config.allow_rnn = True
    if name in WHOLE_MODES:
        return captured(whole_step(model, loss_fn, optimizer, mode=WHOLE_MODES[name]))
    in_graph = name.startswith("graph") and torch.cuda.is_available()
    update = make_optimizer(optimizer, model, capturable=in_graph)
    forward = torch.compile(loss_fn, mode=MODES[name]) if name in MODES else loss_fn

    def step(*batch: Tensor) -> Tensor:
        loss = forward(model, *batch)
        loss.backward()
        update.step()
        update.zero_grad()
        return loss.detach()

    return captured(step) if in_graph else lambda batch: step(*batch)


def make_optimizer(name: OptimizerName, model: nn.Module, *, capturable: bool = False) -> torch.optim.Optimizer:
    """Make the optimizer in the fastest form of torch's."""
    if name == "adamw":
        lr = LEARNING_RATES[name]
        return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=DECAY, fused=True, capturable=capturable)
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATES[name], momentum=MOMENTUM, fused=True)


def whole_step(model: nn.Module, loss_fn: LossFn, optimizer: OptimizerName, *, mode: str) -> Callable[..., Tensor]:
    """Compile forward, loss, backward and update as one function, which ``optimizer.step()`` would break in two."""
    torch._dynamo.config.trace_autograd_ops = True
    params = [p for p in model.parameters() if p.requires_grad]
    lr = LEARNING_RATES[optimizer]
    means, squares = ([torch.zeros_like(p) for p in params] for _ in range(2))
    counts = [torch.zeros((), device=p.device) for p in params]
    on_gpu = torch.cuda.is_available()

    def step(*batch: Tensor) -> Tensor:
        loss = loss_fn(model, *batch)
        grads = list(torch.autograd.grad(loss, params))
        with torch.no_grad():
            if optimizer == "adamw":
                adamw(
                    params, grads, means, squares, [], counts, foreach=False, capturable=on_gpu, amsgrad=False,
                    beta1=BETAS[0], beta2=BETAS[1], lr=lr, weight_decay=DECAY, eps=EPS, maximize=False,
                )  # fmt: skip
            else:
                sgd(
                    params, grads, list(means), foreach=False, weight_decay=0.0, momentum=MOMENTUM, lr=lr,
                    dampening=0.0, nesterov=False, maximize=False,
                )  # fmt: skip
        return loss.detach()

    return torch.compile(step, fullgraph=True, mode=mode)


def captured(step: Callable[..., Tensor]) -> Step:
    """Put a step into one CUDA graph once it is warm; without a GPU, it is called as it is."""
    if not torch.cuda.is_available():
        return lambda batch: step(*batch)
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    static: list[Tensor] = []
    results: list[Tensor] = []
    calls = 0

    def call(batch: Batch) -> Tensor:
        nonlocal calls
        calls += 1
        if calls <= WARM_UPS:
            # Torch's notes on graphs warm up on a side stream: what the default stream has cached stays out of it.
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                loss = step(*batch)
            torch.cuda.current_stream().wait_stream(side)
            return loss
        if not results:
            static.extend(x.clone() for x in batch)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                results.append(step(*static))
        for there, x in zip(static, batch, strict=True):
            there.copy_(x)
        graph.replay()
        return results[0].clone()

    return call
