"""Training in real Lightning, and the same by hand."""

import logging
import warnings
from contextlib import nullcontext

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.nn import functional as F

CLIP = 0.05


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))


def batches(rank=0, count=6):
    generator = torch.Generator().manual_seed(rank)
    return [(torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator)) for _ in range(count)]


class Training(LightningModule):
    """Makes its optimizer from the bare model, as Lightning has it."""

    def __init__(self, make_optimizer):
        super().__init__()
        self.net = make_net()
        self.make_optimizer = make_optimizer

    def training_step(self, batch, _):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return self.make_optimizer(self.net)


def in_lightning(make_optimizer, folder, rank=0, **options):
    """The weights after a run of Lightning."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    training = Training(make_optimizer)
    trainer = Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, use_distributed_sampler=False, **options,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(training, torch.utils.data.DataLoader(batches(rank), batch_size=None))
    return torch.cat([p.detach().flatten() for p in training.net.parameters()])


def by_hand(make_optimizer, *, scaler=None, dtype=None, clip=CLIP):
    """The same, in a loop of one's own."""
    net = make_net()
    optimizer = make_optimizer(net)
    for x, y in batches():
        with torch.autocast("cpu", dtype) if dtype is not None else nullcontext():
            loss = F.cross_entropy(net(x), y)
        (scaler.scale(loss) if scaler is not None else loss).backward()
        if scaler is not None:
            scaler.unscale_(optimizer)
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in net.parameters()])
