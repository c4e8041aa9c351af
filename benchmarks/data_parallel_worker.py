"""One rank of the data-parallel benchmark: reads jobs, one JSON object a line, and answers each with one."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import gradweave
import gradweave.compiler
from gradweave._runtime.peers.link import measure_all_reduce
from gradweave._runtime.split_calls.queue import WeightGradientQueue
from gradweave.compare.models import GPT, ResNet18
from gradweave.parallel.data_parallel import DataParallel
from gradweave.parallel.data_parallel.autotune import simulate
from gradweave.parallel.data_parallel.layers import UseOrder
from gradweave.parallel.data_parallel.reverse_first_k import calls_by_layer
from gradweave.parallel.data_parallel.step_costs import StepWatch
from gradweave.schedule import Link, network

LEADING_STEPS = 3
"""Of a turn, not counted: what the turn before has left behind, and the first overlap."""
WATCHED_STEPS = 5
SHRUNK = 8
"""Emulated layers have this part of the bytes of the real ones, and the link has it too."""


class _Wait(torch.autograd.Function):
    """Takes a given time in forward, and another in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        ctx.backward_seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        time.sleep(ctx.backward_seconds)
        return grad.clone(), None, None


class WaitingLayer(nn.Linear):
    """A layer with weights of a given size that waits as long as another one would compute."""

    def __init__(self, elements: int, forward: float, input_grad: float, weight_grad: float) -> None:
        super().__init__(1, max(elements, 1), bias=False)
        self.seconds = forward, input_grad
        self.weight.register_hook(lambda _: time.sleep(weight_grad))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(_Wait.apply(input, *self.seconds)).mean(-1, keepdim=True)


def waiting_resnet50(seconds: float) -> nn.Module:
    """ResNet-50's layers, their parts of a step in proportion to its operations."""
    layers = network("resnet50").layers
    whole = sum(c.forward + c.input_grad + c.weight_grad for c in layers)
    scale = seconds / whole
    return nn.Sequential(
        *(
            WaitingLayer(
                c.parameter_bytes // 4 // SHRUNK, scale * c.forward, scale * c.input_grad, scale * c.weight_grad
            )
            for c in layers
        )
    )


def waiting_uniform(seconds: float) -> nn.Module:
    """48 equal layers."""
    part = seconds / (3 * 48)
    return nn.Sequential(*(WaitingLayer(64 * 1024, part, part, part) for _ in range(48)))


def make(name: str, seconds: float) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """A model and a function that computes a loss of it on data of its own."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(dist.get_rank())
    if name.startswith("waiting"):
        model = waiting_resnet50(seconds) if name == "waiting resnet50" else waiting_uniform(seconds)
        x = torch.randn(1, 1, generator=generator)
        return model, lambda m: m(x).square().mean()
    if name == "resnet18":
        images = torch.randn(24, 3, 64, 64, generator=generator)
        labels = torch.randint(0, 1000, (24,), generator=generator)
        return ResNet18(), lambda m: F.cross_entropy(m(images), labels)
    tokens = torch.randint(0, 4096, (4, 129), generator=generator)
    model = GPT(vocabulary=4096, width=384, blocks=6, heads=6, tokens=128)
    return model, lambda m: F.cross_entropy(m(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class Variant:
    """A model that is trained in one way."""

    def __init__(self, model: str, seconds: float, way: str, options: dict[str, Any]) -> None:
        plain, self.loss = make(model, seconds)
        self.optimizer = torch.optim.SGD(plain.parameters(), lr=1e-3, momentum=0.9, fused=way.endswith("fused"))
        self.model: nn.Module = plain
        self.step: Callable[[], torch.Tensor] = self.take_step
        if way.startswith("ddp"):
            self.model = wrapped = DistributedDataParallel(plain, **options)
            if way.startswith("ddp_compiled"):
                self.loss = torch.compile(self.loss)
            if "bf16" in way:
                # torch's own hook, behind a name for which DDP does not insist on NCCL.
                wrapped.register_comm_hook(None, lambda state, bucket: bf16_compress_hook(state, bucket))
        elif way.startswith("ours"):
            reduced = torch.bfloat16 if way == "ours_bf16" else None
            self.model = DataParallel(plain, self.optimizer, reduce_dtype=reduced, **options)
        elif way.startswith("compile"):
            if "reduce_dtype" in options:
                options = {**options, "reduce_dtype": getattr(torch, options["reduce_dtype"])}
            self.step = gradweave.compile(plain, self.loss, self.optimizer, mesh=dist.group.WORLD, **options)

    def steps(self, count: int) -> tuple[float, float]:
        """Seconds of a step from beginning to beginning, and the last loss."""
        begins, loss = [], torch.zeros(())
        for _ in range(count + LEADING_STEPS + 1):
            begins.append(time.perf_counter())
            loss = self.step()
        for one in (self.model, self.step):  # what is left must not run beside the next variant's steps
            if isinstance(one, (DataParallel, gradweave.compiler.Step)):
                one.flush()
        spent = begins[-1] - begins[LEADING_STEPS]
        return spent / count, float(loss.detach())

    def take_step(self) -> torch.Tensor:
        """Take a step as one writes it."""
        loss: torch.Tensor = self.loss(self.model)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def predict(model: str, seconds: float, megabits: float, bucket_bytes: int, default_bytes: int) -> dict[str, Any]:
    """What the simulator says of steps whose layers were measured without communication."""
    plain, loss = make(model, seconds)
    optimizer = torch.optim.SGD(plain.parameters(), lr=1e-3, momentum=0.9)
    order = UseOrder(plain)
    loss(plain).backward()
    order.close()
    layers = order.layers(order.numbers())
    watch = StepWatch(layers, optimizer, torch.device("cpu"))
    for _ in range(WATCHED_STEPS):
        with calls_by_layer(WeightGradientQueue(watch), layers):
            value = loss(plain)
        watch.backward_begins()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
    agreed = [watch.close()]
    dist.broadcast_object_list(agreed, 0)
    costs = agreed[0]
    measured = measure_all_reduce(None, torch.device("cpu"), sum(c.parameter_bytes for c in costs.layers))
    burden = 0.0 if model.startswith("waiting") else measured.device_seconds  # waiting takes no core
    link = Link(megabits * 1e6 / 8, measured.latency, burden)
    ranks = dist.get_world_size()
    best, _ = simulate(costs, link, ranks, bucket_bytes, None)
    none, _ = simulate(costs, link, ranks, bucket_bytes, None, k=0)
    default, _ = simulate(costs, link, ranks, default_bytes, None, k=0)
    return {
        "compute": sum(c.forward + c.input_grad + c.weight_grad + c.update for c in costs.layers),
        "bytes": sum(c.parameter_bytes for c in costs.layers), "ratio": best.ratio, "k": best.arrangement.k,
        "ddp_small": best.stock, "ddp": default.stock, "no_barrier": none.best, "reverse_first_k": best.best,
        "measured_megabits": measured.bandwidth * 8 / 1e6, "latency": measured.latency,
        "device_ns_per_byte": 1e9 * burden,
    }  # fmt: skip


def serve() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = f"tcp://{os.environ['MASTER_ADDR']}:29533"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    torch.set_num_threads(1)
    if os.environ.get("PINNED"):
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    variants: dict[str, Variant] = {}
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        job = json.loads(line)
        what = job.pop("job")
        answer: dict[str, Any] = {}
        if what == "predict":
            answer = predict(**job)
        elif what == "make":
            name = job.pop("name")
            variants[name] = Variant(**job)
        elif what == "drop":
            for variant in variants.values():
                if isinstance(variant.model, DataParallel):
                    variant.model.detach()
            variants.clear()
        elif what == "steps":
            variant = variants[job["name"]]
            dist.barrier()
            spent, loss = variant.steps(job["count"])
            answer = {"seconds": spent, "loss": loss}
            if isinstance(variant.model, DataParallel):
                answer |= {"explained": variant.model.explain(), "k": variant.model.k}
            elif isinstance(variant.step, gradweave.compiler.Step):
                answer["explained"] = variant.step.explain()
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    serve()
