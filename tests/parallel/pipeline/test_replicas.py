"""Two pipelines of two ranks each that train replicas, against training of the whole model on both batches.

A function above a test runs on every rank, and returns what its test looks at.
"""

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import SGD

import gradweave
from gradweave.optim import Eva
from gradweave.parallel.pipeline import Pipeline
from parallel.pipeline.models import batch, loss_fn, make, stock_step
from worlds import World


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """Four ranks."""
    world = World(tmp_path_factory.mktemp("four"), 4, 1)
    yield world
    world.close()


def pipeline_of(name, *, differ=False, **options):
    """Return this rank's pipeline, one of two, and the number of the replica."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "stage"))
    number = mesh.get_local_rank("data")
    model = make(name)
    if differ:
        with torch.no_grad():
            for p in model.parameters():
                p.add_(number)
    pipe = Pipeline(
        model, loss_fn, microbatches=4, process_group=mesh["stage"].get_group(), replicas=mesh["data"], timeout=20,
        **options,
    )  # fmt: skip
    return pipe, number


def trains(name, *, steps=3, accumulate=1, clip=None, differ=False, **options):
    """Train; return the largest differences of weights and norms from those of the whole model on all batches."""
    pipe, number = pipeline_of(name, differ=differ, **options)
    opt = SGD(pipe.module.parameters(), lr=0.1, momentum=0.9)
    stock = make(name)
    stock_opt = SGD(stock.parameters(), lr=0.1, momentum=0.9)
    norms = []
    for step in range(steps):
        for part in range(accumulate):
            seed = 10 * step + part
            for replica in range(2):
                stock_step(stock, name, 4, seed=2 * seed + replica, factor=0.5)
            if part < accumulate - 1:
                with pipe.no_update():
                    pipe.step(*batch(name, seed=2 * seed + number))
            else:
                pipe.step(*batch(name, seed=2 * seed + number))
        if clip is not None:
            wanted = torch.nn.utils.clip_grad_norm_(stock.parameters(), clip)
            norms.append(float((pipe.clip_grad_norm_(clip) - wanted).abs()))
        for optimizer in (opt, stock_opt):
            optimizer.step()
            optimizer.zero_grad()
    weights = dict(stock.named_parameters(remove_duplicate=False))
    own = dict(pipe.module.named_parameters(remove_duplicate=False))
    worst = max(float((p - weights[n]).abs().max().detach()) for n, p in own.items())
    pipe.close()
    return {"worst": worst, "norms": norms}


@pytest.mark.parametrize(("policy", "options"), [("modulo", {"group": 1}), ("fast_forward", {}), ("one_f_one_b", {})])
def test_replicas_train_as_the_whole_model_does_on_all_batches(four, policy, options):
    for found in four.run(trains, name="gpt", policy=policy, **options).values():
        assert found["worst"] < 1e-6


@pytest.mark.parametrize(
    ("name", "options"),
    [("tied", {"clip": 0.1}), ("gpt", {"accumulate": 3, "clip": 0.05}), ("gpt", {"differ": True})],
)
def test_tied_weights_clipping_micro_batches_and_weights_that_differ_at_first(four, name, options):
    for found in four.run(trains, name=name, **options).values():
        assert found["worst"] < 1e-6
        assert all(norm < 1e-6 for norm in found["norms"])


def refuses(*, different):
    """Return the error of pipelines that differ between replicas."""
    own = different if dist.get_rank() >= 2 else {}
    try:
        pipeline_of("gpt", **own)
    except gradweave.GradweaveError as error:
        return str(error)
    return "none"


def test_replicas_with_other_plans_are_refused_on_all_ranks(four):
    errors = four.run(refuses, different={"policy": "fast_forward"})
    assert all("the plan" in error for error in errors.values())


def loses_one(*, at):
    """End one rank of the second pipeline in a step; return the errors of the others."""
    pipe, number = pipeline_of("gpt")
    opt = SGD(pipe.module.parameters(), lr=0.1)
    before = []
    began = time.monotonic()
    try:
        for step in range(at + 1):
            if step == at and dist.get_rank() == 3:
                os._exit(0)
            before = [p.detach().clone() for p in pipe.module.parameters()]
            began = time.monotonic()
            pipe.step(*batch("gpt", seed=2 * step + number))
            opt.step()
            opt.zero_grad()
    except gradweave.GradweaveError as error:
        whole = all(torch.equal(*pair) for pair in zip(pipe.module.parameters(), before, strict=True))
        return type(error).__name__, time.monotonic() - began, whole
    return "none", 0.0, True


def test_a_rank_that_is_lost_is_an_error_in_both_pipelines(tmp_path):
    world = World(tmp_path, 4, 1, timeout=timedelta(seconds=15))
    try:
        world.ask(loses_one, range(4), at=2)
        answers = world.answers([0, 1, 2])
    finally:
        world.close()
    for kind, seconds, whole in answers.values():
        assert kind == "LostPeerError"
        assert seconds < 40
        assert whole


def ends_equal(*, optimizer, freezes=False):
    """Train in micro-batches, perhaps with a layer that is frozen behind the first of them; return the weights."""
    pipe, number = pipeline_of("gpt")
    opt = Eva(pipe.module, lr=0.02) if optimizer == "Eva" else SGD(pipe.module.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        with pipe.no_update():
            pipe.step(*batch("gpt", seed=4 * step + number))
        if freezes and step == 2:
            next(iter(pipe.module.parameters())).requires_grad_(False)
        pipe.step(*batch("gpt", seed=4 * step + 2 + number))
        opt.step()
        opt.zero_grad()
    weights = [p.detach().clone() for p in pipe.module.parameters()]
    pipe.close()
    return weights


@pytest.mark.parametrize(("optimizer", "freezes"), [("Eva", False), ("SGD", True)])
def test_replicas_stay_equal(four, optimizer, freezes):
    """Vectors are averaged over replicas, too, and gradients of a layer that was frozen since."""
    found = four.run(ends_equal, optimizer=optimizer, freezes=freezes)
    for stage in (0, 1):
        assert all(torch.equal(*pair) for pair in zip(found[stage], found[stage + 2], strict=True))


def departs():
    """Change a weight of one replica by hand; return the errors."""
    pipe, number = pipeline_of("gpt")
    try:
        for step in range(6):
            if step == 1 and number == 1:
                with torch.no_grad():
                    next(iter(pipe.module.parameters())).add_(1.0)
            pipe.step(*batch("gpt", seed=2 * step + number))
    except gradweave.GradweaveError as error:
        return str(error)
    return "none"


def test_replicas_whose_weights_come_to_differ_are_an_error(tmp_path):
    world = World(tmp_path, 4, 1, timeout=timedelta(seconds=15))
    try:
        errors = world.run(departs)
    finally:
        world.close()
    assert any("weights differ" in error for error in errors.values())
    assert "none" not in errors.values()
