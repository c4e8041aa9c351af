"""Inside Lightning's Trainer and Fabric: what a plain loop gives, or an error before a weight changes that says why.

Two ranks, one per node, or both of one node. Each way of training gives the weights at the end, or what was said, if
that was before a weight had changed.
"""

import logging
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils.data import DataLoader

from gradweave.parallel.daso import DASO
from parallel.daso.training import TIMEOUT
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
from worlds import World


def attach(model, optimizer, nodes, **options):
    mesh = init_device_mesh("cpu", (nodes, 2 // nodes), mesh_dim_names=("node", "local"))
    rhythm = {"every": 3, "wait": 1} if nodes == 2 else {}
    return DASO(model, optimizer, mesh, timeout=TIMEOUT, **rhythm, **options)


def data():
    return DataLoader(Points(dist.get_rank()), BATCH)


def by_hand(*, nodes=2, accumulated=1):
    """Train in a plain loop, which other tests compare with a simulation."""
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
    """Train in a Trainer per rank, or in one over both ranks.

    Args:
        where: Hook that attaches DASO.
        strategy: Strategy of Lightning.
        of: What DASO is given: the model, or the whole Lightning module.
        nodes: One, or two.
        accumulated: Batches of a step.
        alone: Whether Lightning is told that there is one rank; it hears of torchrun's otherwise.
        manual: Whether the module steps by itself.
        options: Options of DASO.
    """
    _as_torchrun()
    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    model, optimizer = setting()
    attached = []

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.automatic_optimization = model, not manual
            self.attach("constructor", optimizer)

        def attach(self, here, stepped):
            if here == where:
                attached.append(attach(self.net if of == "the model" else self, stepped, nodes, **options))

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
            attached[0].finish()

    def way():
        trainer = lightning.Trainer(
            accelerator="cpu", strategy=strategy, devices=2 if strategy == "ddp" else 1, max_epochs=EPOCHS,
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            use_distributed_sampler=False, gradient_clip_val=None if manual else 1.0,
            accumulate_grad_batches=accumulated, plugins=[_alone()] if alone and strategy != "ddp" else None,
        )  # fmt: skip
        trainer.fit(Module(), data())
        return weights(model)

    return _ended(way, model, attached)


def in_fabric(*, order, strategy="auto"):
    _as_torchrun()
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", strategy=strategy, devices=2 if strategy == "ddp" else 1)
    fabric.launch()
    model, optimizer = setting()
    attached = []

    def way():
        if order == "DASO first":
            attached.append(attach(model, optimizer, 2))
        trained, stepped = fabric.setup(model, optimizer)
        if order == "DASO of the model":
            attached.append(attach(model, stepped, 2))
        if order == "DASO of what setup() gives":
            attached.append(attach(trained, stepped, 2))
        for _ in range(EPOCHS):
            for x, y in data():
                fabric.backward(F.cross_entropy(trained(x), y))
                fabric.clip_gradients(trained, stepped, max_norm=1.0)
                stepped.step()
                stepped.zero_grad()
        attached[0].finish()
        return weights(model)

    return _ended(way, model, attached)


def _ended(way, model, attached):
    try:
        return _tried(way, model)
    finally:
        for daso in attached:
            with suppress(RuntimeError):
                daso.detach()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    world = World(tmp_path_factory.mktemp("ranks"), 2, 1)
    yield world
    world.close()


PLACES = [
    ("constructor", "the model"),
    ("configure_optimizers", "the model"),
    ("configure_optimizers", "the module"),
    ("on_fit_start", "the model"),
    ("on_train_start", "the module"),
]


def equal(answers, expected):
    for answer in answers.values():
        assert isinstance(answer, torch.Tensor), answer
        assert torch.equal(answer, expected[0])


def refused(answers):
    for said in answers.values():
        assert isinstance(said, str)
        assert not said.startswith("too late")
        assert "DistributedDataParallel" in said
        assert "averages gradients already, over ranks [0, 1]" in said
        assert "Lightning: no ddp strategy" in said


@pytest.fixture(scope="module")
def expected(ranks):
    return ranks.run(by_hand)


@pytest.mark.parametrize(("where", "of"), PLACES)
def test_a_trainer_of_one_device_gives_what_a_loop_gives(ranks, expected, where, of):
    equal(ranks.run(in_lightning, where=where, of=of), expected)


@pytest.mark.parametrize("options", [{"alone": False}, {"manual": True}], ids=["under torchrun", "manual optimization"])
def test_a_trainer_may_know_of_other_ranks_and_the_module_may_step_by_itself(ranks, expected, options):
    equal(ranks.run(in_lightning, where="on_fit_start", **options), expected)


def test_batches_that_a_trainer_accumulates(ranks):
    equal(ranks.run(in_lightning, where="on_fit_start", accumulated=2), ranks.run(by_hand, accumulated=2))


@pytest.mark.parametrize(("where", "of"), PLACES)
def test_a_trainer_that_averages_over_all_ranks_is_refused_in_its_first_step(ranks, where, of):
    refused(ranks.run(in_lightning, where=where, of=of, strategy="ddp"))


def test_a_trainer_that_averages_over_the_one_node_is_refused_unless_daso_leaves_averaging_to_it(ranks):
    refused(ranks.run(in_lightning, where="on_fit_start", strategy="ddp", nodes=1))
    left = ranks.run(in_lightning, where="on_fit_start", strategy="ddp", nodes=1, average_gradients=False)
    looped = ranks.run(by_hand, nodes=1)
    for answer in left.values():
        assert torch.equal(answer, left[0])
        assert torch.allclose(answer, looped[0], atol=1e-6)


@pytest.mark.parametrize("order", ["DASO first", "DASO of the model", "DASO of what setup() gives"])
def test_fabric_without_and_with_ddp(ranks, expected, order):
    equal(ranks.run(in_fabric, order=order), expected)
    refused(ranks.run(in_fabric, order=order, strategy="ddp"))
