"""The Eva family on pipelines: bit for bit what it does without one, or refused; and trial runs that leave no trace.

A function above a test runs on every rank, and returns what its test looks at.
"""

import gc
import random
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import prune

from gradweave._compat.distributed import group_count
from gradweave._runtime.claims import pipeline_part
from gradweave.errors import ArgumentError, GradweaveError, UnsupportedError
from gradweave.optim import Eva, EvaF, EvaS
from gradweave.parallel.pipeline import Pipeline, api, whole_model
from parallel.pipeline.models import batch, loss_fn, make, stock_step

FAMILY = [Eva, EvaF, EvaS]


def trained(kind, name, policy, *, spoiled=None, steps=4, microbatches=4):
    """Train; return the largest difference of a weight from training without a pipeline.

    Args:
        kind: The optimizer.
        name: Of the model.
        policy: Of the pipeline.
        spoiled: The step whose gradients are not all finite: of one weight, which one rank has.
        steps: How many.
        microbatches: Of a batch.
    """
    stock = make(name)
    reference = kind(stock, lr=0.05, **({} if kind is EvaS else {"process_group": None}))
    pipe = Pipeline(make(name), loss_fn, microbatches=microbatches, policy=policy, timeout=20)
    optimizer = kind(pipe.module, lr=0.05)
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


@pytest.mark.parametrize("kind", FAMILY)
@pytest.mark.parametrize(("name", "policy"), [("gpt", "modulo"), ("mlp", "gpipe"), ("convolutions", "fast_forward")])
def test_weights_are_those_of_the_whole_model_bit_for_bit(two, kind, name, policy):
    assert set(two.run(trained, kind=kind, name=name, policy=policy).values()) == {0.0}


@pytest.mark.parametrize("kind", FAMILY)
def test_all_ranks_leave_out_a_step_that_is_not_finite_on_one(two, kind):
    assert set(two.run(trained, kind=kind, name="linears", policy="fast_forward", spoiled=1).values()) == {0.0}


@pytest.mark.parametrize("kind", [Eva, EvaF])
def test_tied_weights_keep_one_rule_on_all_ranks(two, kind):
    """Their gradients differ by rounding, of which AdamW makes whole steps of biases without a gradient, in EvaS."""
    assert all(found < 1e-6 for found in two.run(trained, kind=kind, name="tied", policy="modulo", steps=2).values())


def refused_rules():
    """Return what rules with one scale for all layers raise, and the hooks they leave; then take a step."""
    pipe = Pipeline(make("linears"), loss_fn, microbatches=4, policy="fast_forward", timeout=20)
    said = []
    for make_one in (
        lambda: Eva(pipe.module, faithful=True),
        lambda: EvaF(pipe.module, reference=True),
        lambda: EvaS(pipe.module, faithful=True),
    ):
        try:
            make_one()
        except (ArgumentError, UnsupportedError) as error:
            said.append(str(error))
    hooks = sum(len(module._forward_hooks) for module in pipe.module.modules())
    pipe.step(*batch("linears"))
    pipe.close()
    return said, hooks


def test_rules_with_one_scale_for_all_layers_are_refused(two):
    for said, hooks in two.run(refused_rules).values():
        assert len(said) == 3
        assert all("layers, which are on 2 ranks" in message for message in said)
        assert hooks == 0


def made_before():
    """Return what a pipeline raises of optimizers made for the whole model; take a step after they are gone."""
    model, said = make("linears"), []
    for make_one in FAMILY:
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


def test_an_optimizer_that_was_made_for_the_whole_model_is_refused(two):
    for said in two.run(made_before).values():
        assert len(said) == 3
        for kind, message in zip(FAMILY, said, strict=True):
            assert f"has an optimizer {kind.__name__}:" in message
            assert "make it after the pipeline, for its .module" in message


def missing(patience=0.5):
    """Return what a step raises if the first rank alone has an Eva optimizer, and whether weights stay as they were."""
    stock, whole_model._PATIENCE = whole_model._PATIENCE, timedelta(seconds=patience)
    pipe = Pipeline(make("linears"), loss_fn, microbatches=4, policy="fast_forward", timeout=20)
    own = list(pipe.module.parameters())
    optimizer = Eva(pipe.module, lr=0.05) if dist.get_rank() == 0 else torch.optim.SGD(own, 0.1)
    before = [p.detach().clone() for p in own]
    pipe.step(*batch("linears"))
    said = ""
    if dist.get_rank() == 0:
        try:
            optimizer.step()
        except GradweaveError as error:
            said = str(error)
    whole_model._PATIENCE = stock
    same = all(torch.equal(p, q) for p, q in zip(own, before, strict=True))
    pipe.close()
    return said, same


def test_a_rank_without_an_optimizer_of_the_family_is_named(two):
    found = two.run(missing)
    assert "rank 1 of the pipeline has no optimizer of this kind" in found[0][0]
    assert found[0][1]


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
    """Take two steps; return how often layers, hooks and the loss were called, and whether random numbers are right."""
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


@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize("split", ["fast", "torch"])
def test_a_trial_run_leaves_no_trace(two, copied, split):
    """Two steps of two micro-batches: four calls of each layer."""
    for rank, found in two.run(trial, copied=copied, split=split).items():
        assert found["hook"] == found["before"] == found["backward"] == 8, found
        assert found["loss"] == (4 if rank == 1 else 0)
        assert found["tracked"] == [4] * len(found["tracked"])
        assert found["random"]
        assert found["last"]
        if copied:
            assert found["calls"] == [4] * 4


def a_hook_that_changes_shapes():
    """Return what a step raises if a hook, which no trial run sees, changes what the next stage waits for."""
    pipe = Pipeline(make("linears"), loss_fn, microbatches=4, policy="fast_forward", timeout=5)
    pipe.module[-1].register_forward_hook(lambda _, __, y: y.double() if not pipe.has_last_stage else y)
    try:
        pipe.step(*batch("linears"))
    except Exception as error:
        return str(error)
    return ""


def test_a_hook_that_changes_what_is_handed_on_is_refused(two):
    found = two.run(a_hook_that_changes_shapes)
    assert all("have hooks leave it as it is" in said for said in found.values()), found


def failing_constructor(step):
    """Return what a pipeline raises that cannot be made, and what it leaves: hooks, process groups, threads."""

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


@pytest.mark.parametrize(
    "step", ["find_ties", "check_layers", "TiedGradients", "OptimizerClaims", "Stage", "make_runtime"]
)
def test_a_pipeline_that_cannot_be_made_leaves_nothing(fresh, step):
    for rank, (said, marked, groups, threads) in fresh(2).run(failing_constructor, step=step).items():
        assert said == "cannot be made", rank
        assert (marked, groups, threads) == (0, 0, 0), rank
