"""Training in DataParallel together with other wrappers, in any order.

Each function runs on every rank. It returns the weights at the end, or the error, if that came before a weight changed.
"""

import os
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from gradweave.errors import GradweaveError
from gradweave.parallel.data_parallel import DataParallel

EPOCHS, BATCH, IMAGES = 3, 8, 32


class Points(Dataset):
    """A data set, another one on each rank."""

    def __init__(self, rank):
        generator = torch.Generator().manual_seed(rank)
        self.x = torch.randn(IMAGES, 12, generator=generator)
        self.y = (self.x[:, 0] > 0).long()

    def __len__(self):
        return IMAGES

    def __getitem__(self, index):
        return self.x[index], self.y[index]


def setting():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def train(model, optimizer, trained, loader=None, backward=torch.Tensor.backward, steps=EPOCHS):
    for _ in range(steps):
        for x, y in loader or DataLoader(Points(dist.get_rank()), BATCH):
            backward(F.cross_entropy(trained(x), y))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def by_ddp():
    model, optimizer = setting()
    train(model, optimizer, DistributedDataParallel(model))
    return weights(model)


def _tried(way, model):
    """Return the result of a way, or the error that it raises; the error begins with "too late" if a weight changed."""
    before = weights(model)
    warnings.simplefilter("ignore")
    try:
        end = way()
    except (GradweaveError, RuntimeError) as error:
        after = weights(model)
        if not isinstance(error, GradweaveError) and "aten.view" not in str(error):
            raise
        end = str(error) if torch.equal(after, before) else f"too late: {error}"
    dist.barrier()
    return end


def _as_torchrun():
    """Set the variables of torchrun that frameworks look for."""
    os.environ |= {
        "LOCAL_RANK": str(dist.get_rank()), "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "1", "LOCAL_WORLD_SIZE": str(dist.get_world_size()),
    }  # fmt: skip


# torch's own


def in_torch(*, order):
    model, optimizer = setting()
    kept = nn.Sequential(*model)  # holds on to the layers, whatever becomes of the model
    options = {"device_id": torch.device("cpu"), "use_orig_params": True}

    def way():
        if order == "DDP around the wrapper":
            trained = DistributedDataParallel(DataParallel(model, optimizer))
        elif order == "DDP around a module that has the wrapper":
            trained = DistributedDataParallel(nn.Sequential(DataParallel(model, optimizer)))
        elif order == "the wrapper around DDP":
            trained = DataParallel(DistributedDataParallel(model), optimizer)
        elif order == "DDP around the model, before the wrapper":
            trained = DistributedDataParallel(model)
            DataParallel(model, optimizer)
        elif order == "DDP around the model, after the wrapper":
            DataParallel(model, optimizer)
            trained = DistributedDataParallel(model)
        elif order == "DDP that is not used":
            DistributedDataParallel(model)
            trained = DataParallel(model, optimizer, policy="no_barrier")
        elif order == "fully_shard of the wrapper":
            trained = fully_shard(DataParallel(model, optimizer), mesh=init_device_mesh("cpu", (2,)))
        elif order == "fully_shard of the model":
            trained = DataParallel(model, optimizer)
            fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        elif order == "fully_shard of a layer":
            trained = DataParallel(model, optimizer)
            fully_shard(model[3], mesh=init_device_mesh("cpu", (2,)))
        elif order == "the wrapper around fully_shard":
            trained = fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
            trained = DataParallel(model, torch.optim.AdamW(model.parameters()))
        elif order.startswith("torch.compile of the wrapper"):
            own = {"k": 2} if "reverse" in order else {}
            trained = DataParallel(model, optimizer, policy=order.rpartition(", ")[2], **own)
            trained = torch.compile(trained, backend="aot_eager")
        elif order == "torch.compile of the model, after the wrapper":
            trained = DataParallel(model, optimizer, policy="no_barrier")
            model.compile(backend="aot_eager")
        elif order == "FSDP around the wrapper":
            trained = FullyShardedDataParallel(DataParallel(model, optimizer), **options)
        elif order == "the wrapper around FSDP":
            trained = FullyShardedDataParallel(model, **options)
            trained = DataParallel(trained, torch.optim.AdamW(trained.parameters()))
        train(model, optimizer, trained)
        return weights(model)

    if "hard" in order or "FSDP" in order:  # parameters become others: what they were cannot be compared
        try:
            return way()
        except GradweaveError as error:
            return str(error) if not optimizer.state else f"too late: {error}"
        finally:
            del kept
            dist.barrier()
    return _tried(way, model)


# Accelerate


def in_accelerate(*, order):
    _as_torchrun()
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = setting()
    loader = DataLoader(Points(dist.get_rank()), BATCH)

    def way():
        stepped = optimizer
        if order == "prepare(optimizer), then the wrapper":
            stepped = accelerator.prepare(optimizer)
            trained = DataParallel(model, stepped, policy="no_barrier")
        elif order == "the wrapper, then prepare(optimizer)":
            trained = DataParallel(model, optimizer, policy="no_barrier")
            stepped = accelerator.prepare(optimizer)
        elif order == "the wrapper, then prepare(wrapper)":
            trained, stepped = accelerator.prepare(DataParallel(model, optimizer), optimizer)
        elif order == "the wrapper, then prepare(model)":
            DataParallel(model, optimizer)
            trained, stepped = accelerator.prepare(model, optimizer)
        elif order == "prepare(model), then the wrapper around that":
            trained, stepped = accelerator.prepare(model, optimizer)
            trained = DataParallel(trained, stepped)
        elif order == "prepare(model), then the wrapper around the model":
            _, stepped = accelerator.prepare(model, optimizer)
            trained = DataParallel(model, stepped)
        elif order == "prepare(model), then the wrapper, which is not used":
            trained, stepped = accelerator.prepare(model, optimizer)
            DataParallel(model, stepped)
        train(model, stepped, trained, loader, accelerator.backward)
        if isinstance(trained, DataParallel):
            trained.detach()
        return weights(model)

    return _tried(way, model)


# Lightning


def in_lightning(*, order, strategy):
    _as_torchrun()
    import logging

    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    model, optimizer = setting()

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = model
            if order == "in its constructor":
                self.net = DataParallel(model, optimizer)

        def configure_optimizers(self):
            if order == "in configure_optimizers":
                self.net = DataParallel(model, optimizer)
            return optimizer

        def on_train_start(self):
            if order == "in on_train_start":
                self.net = DataParallel(model, self.optimizers())

        def training_step(self, batch):
            x, y = batch
            return F.cross_entropy(self.net(x), y)

    def way():
        trainer = lightning.Trainer(
            accelerator="cpu", strategy=strategy, devices=2 if strategy == "ddp" else 1, max_epochs=EPOCHS,
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            use_distributed_sampler=False, gradient_clip_val=1.0, plugins=None if strategy == "ddp" else [_alone()],
        )  # fmt: skip
        module = Module()
        trainer.fit(module, DataLoader(Points(dist.get_rank()), BATCH))
        if isinstance(module.net, DataParallel):
            module.net.detach()
        return weights(model)

    return _tried(way, model)


def _alone():
    """Lightning without a word of other ranks."""
    from lightning.fabric.plugins.environments import LightningEnvironment

    class Alone(LightningEnvironment):
        def world_size(self):
            return 1

        def global_rank(self):
            return 0

        def local_rank(self):
            return 0

    return Alone()


def in_fabric(*, order):
    _as_torchrun()
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=2)
    fabric.launch()
    model, optimizer = setting()

    def way():
        stepped = optimizer
        if order == "setup(wrapper)":
            trained, stepped = fabric.setup(DataParallel(model, optimizer), optimizer)
        elif order == "setup(model), then the wrapper around that":
            trained, stepped = fabric.setup(model, optimizer)
            trained = DataParallel(trained, stepped)
        elif order == "setup(model), then the wrapper around the model":
            _, stepped = fabric.setup(model, optimizer)
            trained = DataParallel(model, stepped)
        train(model, stepped, trained, backward=lambda loss: loss.backward())
        if isinstance(trained, DataParallel):
            trained.detach()
        return weights(model)

    return _tried(way, model)
