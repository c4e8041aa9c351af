"""Compiles the kernels for an H200, without one, as steps would launch them, and checks which accesses are wide.

Its argument is the precision of the layers whose sums are compiled.
"""

import re
import sys

import torch
from torch import nn
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from gradweave.optim import Eva, EvaF
from gradweave.optim.kernels import (
    first_order_triton,
    gpu_statistics,
    launch,
    launch_triton,
    step,
    step_triton,
    sums_triton,
)

MODULES = (launch_triton, step_triton, first_order_triton, sums_triton)


class NoGpu:
    """The part of a driver that compiling needs."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, _):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


class Launch:
    """A kernel whose launches only compile it, for the types and alignments of real arguments."""

    def __init__(self, name, seen):
        self.kernel = next(getattr(module, name) for module in MODULES if hasattr(module, name))
        self.ptx = seen.setdefault(name, {})

    def __getitem__(self, grid):
        def launch(*args, **options):
            made = self.kernel.warmup(*args, grid=grid, **options)
            self.ptx[made.hash] = made.asm["ptx"]

        return launch


class Kernels:
    def __init__(self):
        self.seen = {}

    def __getattr__(self, name):
        return Launch(name, self.seen)

    def of(self, name):
        return list(self.seen[name].values())


def wide_accesses(ptx):
    return len(re.findall(r"ld\.global[^;]*\.v4", ptx)), len(re.findall(r"st\.global[^;]*\.v4", ptx))


def take_steps(cls, lr, first_order):
    """Take two steps at different addresses, of which some are not aligned."""
    layers = [nn.Linear(300, 70), nn.Linear(64, 50), nn.Linear(9, 5), nn.Linear(301, 3), nn.LayerNorm(64)]
    model = nn.ModuleList([*layers, nn.LayerNorm(9), nn.ConvTranspose2d(4, 4, 3)])
    optimizer = cls(model, lr=lr, first_order=first_order)
    for shift in range(2):
        for p in model.parameters():
            p.grad = torch.zeros(p.numel() + 4)[shift : shift + p.numel()].view(p.shape)
        optimizer.step()


def sum_layers(dtype):
    """Run layers of many and of few channels, next to each other in memory and not."""
    layers = [
        nn.Conv2d(64, 32, 3, padding=1),
        nn.Conv2d(32, 16, 1),
        nn.Conv2d(16, 3, 3),
        nn.Flatten(),
        nn.Linear(108, 8),
    ]
    for order in (torch.channels_last, torch.contiguous_format):
        model = nn.Sequential(*layers).to(dtype).to(memory_format=order)
        x = torch.randn(32, 64, 8, 8, dtype=dtype).contiguous(memory_format=order)
        for optimizer in (Eva(model, lr=0.1, samples=8, faithful=True), EvaF(model, lr=0.1)):
            model(x).square().mean().backward()
            optimizer.detach()


def main(dtype):
    driver.set_active(NoGpu())
    kernels = Kernels()
    step.has_kernels = gpu_statistics.has_kernels = lambda _: True
    launch.import_module = lambda _: kernels
    take_steps(Eva, 0.1, "adamw")
    take_steps(EvaF, torch.tensor(0.1), "sgd")
    for name in ("measure_tiles", "update_tiles", "measure_chunks", "update_adamw", "update_sgd"):
        wide = [wide_accesses(ptx) for ptx in kernels.of(name)]
        assert any(loads for loads, _ in wide), name
        assert name.startswith("measure") or any(stores for _, stores in wide), name
        assert not all(loads for loads, _ in wide), name
    sum_layers(dtype)
    for name in ("sum_one", "sum_many", "add_samples"):
        assert any(re.search(r"ld\.global[^;]*\.v4|cp\.async\.cg[^;]*16", ptx) for ptx in kernels.of(name)), name
    # Addresses and places in tables are no reason to compile again.
    assert len(kernels.of("write_addresses")) == 1
    assert len(kernels.of("measure_tiles")) == 4, len(kernels.of("measure_tiles"))
    assert len(kernels.of("measure_chunks")) == 2
    for name in ("inspect_records", "find_layer_numbers", "commit_vectors"):
        assert len(kernels.of(name)) == 1, name
    print({name: len(found) for name, found in kernels.seen.items()})


if __name__ == "__main__":
    main(getattr(torch, sys.argv[1]))
