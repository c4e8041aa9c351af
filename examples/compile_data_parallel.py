"""Train a small GPT on several ranks, each step one compiled graph that averages gradients.

    torchrun --nproc-per-node 2 examples/compile_data_parallel.py

Without torchrun it trains on one rank. On a machine with GPUs each rank takes one of them.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import gradweave as gw
from gradweave.compare.models import GPT

WORDS, LENGTH = 256, 64


def loss_fn(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    return cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--micro-batches", type=int, default=2, help="of a step")
    parser.add_argument("--lower", choices=("inductor", "replay"), default="inductor")
    parser.add_argument("--checkpoint", default="checkpoint.pt")
    options = parser.parse_args()

    mesh = None
    if "WORLD_SIZE" in os.environ:  # as under torchrun
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        mesh = dist.group.WORLD
    rank = int(os.environ.get("RANK", "0"))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else "cpu"

    torch.manual_seed(0)
    model = GPT(vocabulary=WORDS, width=64, blocks=2, heads=4, tokens=LENGTH).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    step = gw.compile(model, loss_fn, optimizer, mesh=mesh, max_grad_norm=1.0, lower=options.lower)

    generator = torch.Generator().manual_seed(1 + rank)  # each rank has data of its own
    torch.manual_seed(1 + rank)  # and would draw its own dropout
    for number in range(options.steps):
        starts = torch.randint(WORDS, (options.micro_batches, 8, 1), generator=generator)
        batches = (starts + 3 * torch.arange(LENGTH + 1)) % WORDS  # each token tells the next one
        with step.no_update():
            for batch in batches[:-1]:
                step(batch)
        loss = step(batches[-1])
        scheduler.step()
        if rank == 0 and (number % 10 == 0 or number + 1 == options.steps):
            print(f"step {number}: loss {loss:.3f}, norm of the gradients {step.grad_norm:.3f}", flush=True)
    if rank == 0:  # plain state dicts, without prefixes: any rank's would do
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, options.checkpoint)
        print(step.explain())
    step.detach()
    if mesh is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
