"""What ranks of a pipeline do with the Eva family, and what a trial run must leave alone."""

import gc
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import prune

from gradweave import optim
from gradweave.errors import ArgumentError, GradweaveError, UnsupportedError
from gradweave.parallel.pipeline import Pipeline, whole_model
from parallel.pipeline.models import batch, loss_fn, make, stock_step


def trained(kind, name, policy, *, spoiled=None, steps=4, microbatches=4):
    """Largest difference of a weight from training without a pipeline; before one step an infinite gradient is met.

    Args:
        kind: The optimizer.
        name: Of the model.
        policy: Of the pipeline.
        spoiled: The step whose gradients are not all finite: of one weight, which one rank has.
        steps: How many.
        microbatches: Of a batch.
    """
    stock = make(name)
    reference = getattr(optim, kind)(stock, lr=0.05, **({} if kind == "EvaS" else {"process_group": None}))
    pipe = Pipeline(make(name), loss_fn, microbatches=microbatches, policy=policy, timeout=20)
    optimizer = getattr(optim, kind)(pipe.module, lr=0.05)
    last = list(dict(stock.named_parameters()))[-1]
    for step in range(steps):
        stock_step(stock, name, microbatches, seed=step)
        pipe.step(*batch(name, seed=step))
        if step == spoiled:
            for model in (stock, pipe.module):
                p = dict(model.named_parameters()).get(last)
                if p is not None:
                    p.grad.view(-1)[0] = float("inf")
        for one in (reference, optimizer):
            one.step()
            one.zero_grad()
    wanted = dict(stock.named_parameters(remove_duplicate=False))
    own = dict(pipe.module.named_parameters(remove_duplicate=False))
    pipe.close()
    with torch.no_grad():
        return max(float((p - wanted[name]).abs().max()) for name, p in own.items())


def refused_rules():
    """What rules with one scale for all layers say; what a pipeline then still does."""
    pipe = Pipeline(make("linears"), loss_fn, microbatches=4, policy="fast_forward", timeout=20)
    said = []
    for make_one in (
        lambda: optim.Eva(pipe.module, faithful=True),
        lambda: optim.EvaF(pipe.module, reference=True),
        lambda: optim.EvaS(pipe.module, faithful=True),
    ):
        try:
            make_one()
        except (ArgumentError, UnsupportedError) as error:
            said.append(str(error))
    hooks = sum(len(module._forward_hooks) for module in pipe.module.modules())
    pipe.step(*batch("linears"))
    pipe.close()
    return said, hooks


def made_before():
    """What is said where an optimizer was made for the whole model, and once that is gone."""
    model, said = make("linears"), []
    for make_one in (optim.Eva, optim.EvaF, optim.EvaS):
        optimizer = make_one(model)
        try:
            Pipeline(model, loss_fn, microbatches=4, policy="fast_forward", timeout=20)
        except (ArgumentError, UnsupportedError) as error:
            said.append(str(error))
        del optimizer
        gc.collect()
    pipe = Pipeline(model, loss_fn, microbatches=4, policy="fast_forward", timeout=20)
    pipe.step(*batch("linears"))
    pipe.close()
    return said


def missing(patience=0.5):
    """What is said where the first rank alone has an optimizer of the family, and whether anything has changed."""
    from datetime import timedelta

    whole_model._PATIENCE = timedelta(seconds=patience)
    pipe = Pipeline(make("linears"), loss_fn, microbatches=4, policy="fast_forward", timeout=20)
    own = list(pipe.module.parameters())
    optimizer = optim.Eva(pipe.module, lr=0.05) if dist.get_rank() == 0 else torch.optim.SGD(own, 0.1)
    before = [p.detach().clone() for p in own]
    pipe.step(*batch("linears"))
    said = ""
    if dist.get_rank() == 0:
        try:
            optimizer.step()
        except GradweaveError as error:
            said = str(error)
    same = all(torch.equal(p, q) for p, q in zip(own, before, strict=True))
    pipe.close()
    return said, same


class Counted(nn.Module):
    """A layer that counts its calls, uses Python's random numbers, and has a norm and something that no copy has."""

    def __init__(self, *, copied):
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.calls, self.seen = 0, []
        if not copied:
            self.connection = (x for x in ())  # generators cannot be copied

    def forward(self, x):
        self.calls += 1
        self.seen.append(len(x))
        self.drawn = random.random()
        return self.norm(self.linear(x)) * self.drawn


def trial(*, copied, split):
    """How often layers, hooks and the loss were called in two steps, and random numbers behind them."""
    torch.manual_seed(0)
    random.seed(0)
    calls = {"hook": 0, "before": 0, "backward": 0, "loss": 0}

    def count(name):
        def hook(*_):
            calls[name] += 1

        return hook

    def loss(output, target):
        calls["loss"] += 1
        return loss_fn(output, target)

    layers = [Counted(copied=copied) for _ in range(4)]
    layers[1].linear = nn.utils.parametrizations.weight_norm(layers[1].linear)
    prune.random_unstructured(layers[2].linear, "weight", 0.5)
    layers[2](torch.randn(3, 6))  # leaves a weight that cannot be copied
    layers[2].calls, layers[2].seen = 0, []
    random.seed(0)
    pipe = Pipeline(nn.Sequential(*layers), loss, microbatches=2, policy="fast_forward", split=split, timeout=20)
    own = list(pipe.module)
    for layer in own:
        layer.register_forward_hook(count("hook"))
        layer.linear.register_forward_pre_hook(count("before"))
        layer.norm.register_full_backward_hook(count("backward"))
    for step in range(2):
        pipe.step(*batch("linears", seed=step))
    wanted = random.Random(0)
    drawn = [wanted.random() for _ in range(4 * len(own))]
    pipe.close()
    return {
        **calls,
        "calls": [layer.calls for layer in own] + [len(layer.seen) for layer in own],
        "tracked": [int(layer.norm.num_batches_tracked) for layer in own if not hasattr(layer.linear, "weight_orig")],
        "random": random.random() == wanted.random(),
        "last": own[-1].drawn == drawn[-1],
    }


def a_hook_that_changes_shapes():
    """What is said where a hook, which no trial run sees, changes what the next stage waits for."""
    pipe = Pipeline(make("linears"), loss_fn, microbatches=4, policy="fast_forward", timeout=5)
    pipe.module[-1].register_forward_hook(lambda _, __, y: y.double() if not pipe.has_last_stage else y)
    try:
        pipe.step(*batch("linears"))
    except Exception as error:
        return str(error)
    return ""


def failing_constructor(step):
    """What is left of a pipeline that cannot be made: marks, load hooks, process groups, threads."""
    import threading

    from gradweave._compat.distributed import group_count
    from gradweave._runtime.claims import pipeline_part
    from gradweave.parallel.pipeline import api

    def fail(*_, **__):
        raise ValueError("cannot be made")

    model = make("linears")
    groups, threads = group_count(), threading.active_count()
    before, said = getattr(api, step), ""
    setattr(api, step, fail)
    try:
        Pipeline(model, loss_fn, microbatches=4, policy="fast_forward", timeout=20)
    except ValueError as error:
        said = str(error)
    finally:
        setattr(api, step, before)
    dist.barrier()
    left = [module for module in model.modules() if module._load_state_dict_post_hooks or module._forward_hooks]
    pipe = Pipeline(model, loss_fn, microbatches=4, policy="fast_forward", timeout=20)
    assert pipeline_part(pipe.module) is not None
    pipe.step(*batch("linears"))
    pipe.close()
    assert pipeline_part(model) is None
    return said, len(left), group_count() - groups, threading.active_count() - threads
