"""What ranks do in tests of DASO inside Lightning's Trainer and Fabric; see ``worlds``.

Two ranks, one per node, or both of one node. Each way gives the weights at the end, or what was said, if that was
before a weight had changed.
"""

import logging
from contextlib import suppress

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils.data import DataLoader

from gradweave.parallel.daso import DASO
from parallel.data_parallel.frameworks import (
    BATCH,
    EPOCHS,
    Points,
    _alone,
    _as_torchrun,
    _tried,
    setting,
    weights,
)

TIMEOUT = 20


def attach(model, optimizer, nodes, **options):
    mesh = init_device_mesh("cpu", (nodes, 2 // nodes), mesh_dim_names=("node", "local"))
    rhythm = {"every": 3, "wait": 1} if nodes == 2 else {}
    return DASO(model, optimizer, mesh, timeout=TIMEOUT, **rhythm, **options)


def data():
    return DataLoader(Points(dist.get_rank()), BATCH)


def by_hand(*, nodes=2, accumulated=1):
    """The plain loop, which tests elsewhere compare with the published rules."""
    model, optimizer = setting()
    with attach(model, optimizer, nodes):
        for _ in range(EPOCHS):
            for number, (x, y) in enumerate(data(), start=1):
                (F.cross_entropy(model(x), y) / accumulated).backward()
                if number % accumulated == 0:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
    return weights(model)


def in_lightning(
    *, where, strategy="auto", of="the model", nodes=2, accumulated=1, alone=True, manual=False, **options
):
    """A Trainer per rank, or one over both ranks.

    Args:
        where: The hook that attaches.
        strategy: Lightning's.
        of: What DASO is given: the model, or the whole Lightning module.
        nodes: One, or two.
        accumulated: Batches of a step.
        alone: Whether Lightning is told that there is one rank; it hears of torchrun's otherwise.
        manual: Whether the module steps by itself.
        options: Of DASO.
    """
    _as_torchrun()
    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    model, optimizer = setting()
    begun = []

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.automatic_optimization = model, not manual
            self.attach("constructor", optimizer)

        def attach(self, here, stepped):
            if here == where:
                begun.append(attach(self.net if of == "the model" else self, stepped, nodes, **options))

        def configure_optimizers(self):
            self.attach("configure_optimizers", optimizer)
            return optimizer

        def on_fit_start(self):
            self.attach("on_fit_start", self.optimizers())

        def on_train_start(self):
            self.attach("on_train_start", self.optimizers())

        def training_step(self, batch):
            x, y = batch
            loss = F.cross_entropy(self.net(x), y)
            if manual:
                self.manual_backward(loss)
                self.clip_gradients(self.optimizers(), 1.0, "norm")
                self.optimizers().step()
                self.optimizers().zero_grad()
            return loss

        def on_train_end(self):
            begun[0].finish()

    def way():
        trainer = lightning.Trainer(
            accelerator="cpu", strategy=strategy, devices=2 if strategy == "ddp" else 1, max_epochs=EPOCHS,
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            use_distributed_sampler=False, gradient_clip_val=None if manual else 1.0,
            accumulate_grad_batches=accumulated, plugins=[_alone()] if alone and strategy != "ddp" else None,
        )  # fmt: skip
        trainer.fit(Module(), data())
        return weights(model)

    return _ended(way, model, begun)


def in_fabric(*, order, strategy="auto"):
    _as_torchrun()
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", strategy=strategy, devices=2 if strategy == "ddp" else 1)
    fabric.launch()
    model, optimizer = setting()
    begun = []

    def way():
        if order == "DASO first":
            begun.append(attach(model, optimizer, 2))
        trained, stepped = fabric.setup(model, optimizer)
        if order == "DASO of the model":
            begun.append(attach(model, stepped, 2))
        if order == "DASO of what setup() gives":
            begun.append(attach(trained, stepped, 2))
        for _ in range(EPOCHS):
            for x, y in data():
                fabric.backward(F.cross_entropy(trained(x), y))
                fabric.clip_gradients(trained, stepped, max_norm=1.0)
                stepped.step()
                stepped.zero_grad()
        begun[0].finish()
        return weights(model)

    return _ended(way, model, begun)


def _ended(way, model, begun):
    try:
        return _tried(way, model)
    finally:
        for daso in begun:
            with suppress(RuntimeError):
                daso.detach()
