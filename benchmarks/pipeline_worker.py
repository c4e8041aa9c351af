"""One rank of ``pipeline_stages.py``: makes pipelines, and runs steps of them as it is told, line by line."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Function
from torch.nn import functional

from gradweave.compare.models.gpt import _Block as CausalBlock
from gradweave.parallel.pipeline import Pipeline, measure_layers
from gradweave.parallel.pipeline.partition import by_layer
from gradweave.parallel.pipeline.planner import Settings, choose
from gradweave.schedule import Costs, LayerCost

WIDTH = 64
"""Of the layers that wait: small, so that what they do besides waiting is little."""


class _WaitInBackward(Function):
    """Waits in its backward: the emulated X of a layer."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return grad, None


class Waiting(nn.Module):
    """A layer whose compute is emulated by waiting: so long in F, in X, and, by a hook on its weight, in W."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.linear.weight.register_hook(lambda _: time.sleep(seconds))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return _WaitInBackward.apply(self.linear(x), self.seconds)  # type: ignore[no-any-return,no-untyped-call]


class BertBlock(CausalBlock):
    """Attention in both directions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        mixed: torch.Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return mixed


class Embedding(nn.Module):
    """Tokens and places."""

    def __init__(self, vocabulary: int, tokens: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.02 * torch.randn(tokens, width))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.tokens(tokens) + self.position
        return embedded


def transformer(block: Callable[[int, int], nn.Module], *, blocks: int, width: int, tokens: int) -> nn.Sequential:
    vocabulary = 4 * width
    head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False))
    return nn.Sequential(Embedding(vocabulary, tokens, width), *(block(width, 8) for _ in range(blocks)), head)


def cross_entropy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.flatten(0, -2), target.flatten())


class Setting:
    """A model, its batch, its loss and its costs."""

    def __init__(self, job: dict[str, Any]) -> None:
        torch.manual_seed(0)
        size = job["batch"]
        if job["kind"] == "emulated":
            self.model = nn.Sequential(*(Waiting(job["seconds"]) for _ in range(job["layers"])))
            self.batch: tuple[Any, Any] = torch.randn(size, WIDTH), torch.randn(size, WIDTH)
            self.loss: Any = functional.mse_loss
            held = size // job["microbatches"] * WIDTH * 4
            each = [job["seconds"]] * 3
            self.costs = Costs(
                tuple(LayerCost(f"{i}", *each, 0.0, held, held) for i in range(job["layers"])), source="emulated"
            )
        else:
            block = {"gpt": CausalBlock, "bert": BertBlock}[job["model"]]
            shape = {key: job[key] for key in ("blocks", "width", "tokens")}
            self.model = transformer(block, **shape)
            tokens = torch.randint(4 * job["width"], (size, job["tokens"] + 1))
            self.batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
            self.loss = cross_entropy
            part = tuple(one[: size // job["microbatches"]] for one in self.batch)
            self.costs = measure_layers(self.model, self.loss, part)  # type: ignore[arg-type]


def main() -> None:
    rank, size, store, pinned = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4] == "pinned"
    answers, sys.stdout = sys.stdout, sys.stderr
    torch.set_num_threads(1)
    if pinned:
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=120))
    pipes: dict[str, Pipeline] = {}
    setting = Setting(json.loads(sys.stdin.readline()))
    for line in sys.stdin:
        job = json.loads(line)
        answer: dict[str, Any] = {}
        if job["do"] == "make":
            made = Pipeline(
                setting.model, setting.loss, costs=setting.costs, microbatches=job["microbatches"], **job["options"]
            )
            made.step(*setting.batch)
            pipes[job["variant"]] = made
            costs, spans = by_layer(setting.costs, [name for name, _ in setting.model.named_children()])
            free = choose(Settings(microbatches=job["microbatches"], **job["options"]), costs, size, spans=spans)
            answer = {
                "predicted": made.plan.seconds, "peak": made.plan.peak_bytes, "group": made.plan.group,
                "simulated": free.seconds,
            }  # fmt: skip
        else:
            pipe = pipes[job["variant"]]
            dist.barrier()
            began = time.perf_counter()
            pipe.step(*setting.batch)
            dist.barrier()
            answer = {"seconds": time.perf_counter() - began}
            pipe.module.zero_grad()
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
