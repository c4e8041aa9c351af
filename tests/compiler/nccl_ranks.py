"""One of two ranks that train by compiled steps and by DistributedDataParallel; a program of its own.

    python nccl_ranks.py BACKEND DEVICE WAYS

WAYS are pairs of a model and a lowering: ``mlp:replay,gpt:replay,mlp:inductor``.

Several NCCL ranks may share one GPU if each believes that it is on a host of its own (``NCCL_HOSTID``).
"""

import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import gradweave
from gradweave.compare.models import GPT
from gradweave.compiler import planning, replica_group

POLICIES = ("auto", "no_barrier", "reverse_first_k")
STEPS = 6


def make(kind, device):
    torch.manual_seed(0)
    if kind == "gpt":
        return GPT(vocabulary=64, width=64, blocks=2, heads=2, tokens=32).to(device)
    layers = [layer for _ in range(5) for layer in (nn.Linear(64, 64), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(64, 5)).to(device)


def batch(kind, number, device):
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    if kind == "gpt":
        tokens = torch.randint(64, (4, 33), generator=generator).to(device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    labels = torch.randint(5, (8,), generator=generator)
    return torch.randn(8, 64, generator=generator).to(device), labels.to(device)


def loss_fn(model, x, y):
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


def with_ddp(kind, device):
    model = make(kind, device)
    optimizer, wrapped = optimizer_of(model), DistributedDataParallel(model)
    for number in range(STEPS):
        loss_fn(wrapped, *batch(kind, number, device)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def compiled(kind, device, policy, lower):
    model = make(kind, device)
    step = gradweave.compile(model, loss_fn, optimizer_of(model), mesh=dist.group.WORLD, policy=policy, lower=lower)
    for number in range(STEPS):
        step(*batch(kind, number, device))
    step.detach()
    return model, step.eager_reason


def main():
    backend, device, ways = sys.argv[1:]
    dist.init_process_group(backend)
    replica_group.MESSAGE_BYTES = planning.MESSAGE_BYTES = 8000  # several messages
    found = {}
    for kind, lower in (way.split(":") for way in ways.split(",")):
        expected = with_ddp(kind, device)
        for policy in POLICIES:
            model, reason = compiled(kind, device, policy, lower)
            pairs = zip(model.parameters(), expected.parameters(), strict=True)
            found[f"{kind} {lower} {policy}"] = max(float((a - b).abs().max()) for a, b in pairs), reason
    print("found", json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
