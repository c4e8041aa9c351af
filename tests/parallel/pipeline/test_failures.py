"""What goes wrong on one rank is an error on all of them, soon, and never a hang.

A function above a test runs on every rank, and returns what its test looks at.
"""

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradweave.parallel.pipeline import Pipeline
from parallel.pipeline.models import batch, loss_fn, make, stock_step
from parallel.pipeline.training import Failing, a_step, raised, refused

SOON = 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": "nonsense"}, "policy='nonsense': use one of auto, fast_forward"),
        ({"policy": "modulo", "group": 3}, "group=3: 8 layers in groups of 3 do not share out evenly over 2 ranks"),
        ({"policy": "modulo", "group": 8}, "group=8: 8 layers in groups of 8 do not share out evenly"),
        ({"policy": "gpipe", "max_in_flight": 2}, "max_in_flight=2: gpipe is torch's, which takes no cap"),
        ({"policy": "modulo", "microbatches": 0}, "microbatches=0: give a whole number"),
        ({"policy": "auto"}, "policy='auto': needs costs=measure_layers"),
        ({"policy": "modulo", "byte_budget": 9}, "byte_budget=9: needs costs=measure_layers"),
        ({"policy": "modulo", "split": "slow"}, "split='slow': use one of fast, torch"),
        ({"policy": "one_f_one_b", "microbatches": 1}, "microbatches=1: one_f_one_b needs one per rank"),
    ],
)
def test_what_is_refused_is_refused_by_all(two, arguments, message):
    for rank, found in two.run(refused, **arguments).items():
        assert message in found, (rank, found)


@pytest.mark.parametrize(
    ("different", "message"),
    [
        ({"microbatches": 2}, "microbatches: is 2 on rank 1 and 4 on rank 0"),
        ({"name": "tied"}, "parameter 7.out.weight: is the same as 0.tokens.weight on rank 1 and of shape"),
        ({"group": 0}, "group=0: give a whole number, at least 1"),
    ],
)
def test_ranks_that_differ_are_refused_by_all(two, different, message):
    for rank, found in two.run(refused, policy="modulo", different=different).items():
        assert message in found, (rank, found)


def wrong_batch(sizes):
    """Return what a step raises that has batches of these sizes, by rank, and what the next one raises."""
    pipe = Pipeline(make("gpt"), loss_fn, microbatches=4, policy="modulo", group=1, timeout=20)
    pipe.step(*batch("gpt"))
    size = sizes[dist.get_rank()]
    return raised(lambda: pipe.step(*batch("gpt", size=size))), raised(lambda: pipe.step(*batch("gpt")))


@pytest.mark.parametrize(("sizes", "culprit"), [((12, 8), "inputs"), ((8, 4), "target"), ((6, 8), "inputs")])
def test_a_batch_of_another_shape_stops_all_ranks(two, sizes, culprit):
    found = two.run(wrong_batch, sizes=sizes)
    for first, second in found.values():
        assert culprit in first
        assert "this pipeline has stopped" in second


class Growing(nn.Module):
    """A layer whose output depends on the data: longer for one micro-batch."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x) if self.calls < 4 else self.linear(x).repeat(1, 2)


def odd_layer(layer):
    """Return what a step raises whose second layer is odd, and after how many seconds."""
    layers = [nn.Linear(6, 6), layer(), *(nn.Linear(6, 6) for _ in range(2 * dist.get_world_size() - 2))]
    pipe = Pipeline(nn.Sequential(*layers), loss_fn, microbatches=4, policy="modulo", group=1, timeout=20)
    began = time.monotonic()
    message = raised(lambda: pipe.step(*batch("mlp")))
    return message, time.monotonic() - began


@pytest.mark.parametrize(("layer", "message"), [(Growing, "must not change"), (Failing, "had enough")])
def test_a_layer_that_goes_wrong_stops_all_ranks_and_all_know_why(three, layer, message):
    for rank, (found, seconds) in three.run(odd_layer, layer=layer).items():
        assert message in found, (rank, found)
        assert seconds < SOON


def set_trained(model, names, trained):
    for n, p in model.named_parameters():
        if n.partition(".")[0] in names:
            p.requires_grad_(trained)


def frozen_or_thawed_later(policy, trained_first):
    """Freeze or thaw the first stage after a step; return what the next step raises, and gradients that differ."""
    model, stock = make("linears"), make("linears")
    for one in (model, stock):
        set_trained(one, "01", trained_first)
    pipe = Pipeline(model, loss_fn, microbatches=4, policy=policy, timeout=20)
    message = None
    for trained in (trained_first, not trained_first):
        for one in (pipe.module, stock):
            set_trained(one, "01", trained)
        stock_step(stock, "linears", 4)
        message = raised(lambda: pipe.step(*batch("linears")))
    wanted = dict(stock.named_parameters())
    pairs = [] if message else [(n, p.grad, wanted[n].grad) for n, p in pipe.module.named_parameters()]
    pipe.close()
    return message, [n for n, grad, other in pairs if not torch.equal(grad, other)]


@pytest.mark.parametrize("policy", ["fast_forward", "gpipe"])
def test_thawing_all_layers_of_the_first_stage_later_is_refused_by_all(two, policy):
    for rank, (found, _) in two.run(frozen_or_thawed_later, policy=policy, trained_first=False).items():
        assert "needs a gradient, and did not in the first step" in found, (rank, found)


@pytest.mark.parametrize("policy", ["fast_forward", "gpipe"])
def test_freezing_all_layers_of_the_first_stage_later_is_right(two, policy):
    for found in two.run(frozen_or_thawed_later, policy=policy, trained_first=True).values():
        assert found == (None, [])


@pytest.mark.parametrize("options", [{"policy": "fast_forward"}, {"policy": "gpipe"}, {"policy": "zbv"}])
@pytest.mark.parametrize("split", ["fast", "torch"])
def test_a_tensor_that_the_next_stage_does_not_use_is_refused_by_all(two, options, split):
    """torch would send zeros for it, with which weights decay that have no gradient without a pipeline."""
    for rank, found in two.run(a_step, name="unused", split=split, **options).items():
        assert "does not use tensor 1 of what it is given" in found, (rank, found)


def torn_state(reshaped=False):
    """Load a state that is wrong on the last rank; return what that raises, if weights are kept, what a step raises."""
    pipe = Pipeline(make("linears"), loss_fn, microbatches=4, policy="fast_forward", timeout=20)
    before = {n: value.clone() for n, value in pipe.state_dict().items()}
    state = make("linears", seed=3).state_dict()
    state["3.weight"] = torch.zeros(6, 7)
    if not reshaped:
        del state["3.weight"]
    message = raised(lambda: pipe.load_state_dict(state))
    same = all(torch.equal(value, before[n]) for n, value in pipe.state_dict().items())
    after = raised(lambda: pipe.step(*batch("linears")))
    pipe.close()
    return message, same, after


@pytest.mark.parametrize(("reshaped", "words"), [(False, "lacks 3.weight"), (True, "is of shape (6, 7), not (6, 6)")])
def test_a_state_that_one_rank_cannot_load_is_loaded_by_none(two, reshaped, words):
    for rank, (message, same, after) in two.run(torn_state, reshaped=reshaped).items():
        assert words in message, (rank, message)
        assert same
        assert after is None


def death(victim):
    """End one rank; return what a step of the others raises, and after how many seconds."""
    layers = [nn.Linear(6, 6) for _ in range(2 * dist.get_world_size())]
    pipe = Pipeline(nn.Sequential(*layers), loss_fn, microbatches=4, policy="modulo", group=1, timeout=20)
    pipe.step(*batch("mlp"))
    if dist.get_rank() == victim:
        os._exit(1)
    began = time.monotonic()
    message = raised(lambda: pipe.step(*batch("mlp")))
    return message, time.monotonic() - began


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_dies(fresh, victim):
    """The first one hosts the store in which ranks look for each other's reasons."""
    world = fresh(3, tcp=True)
    others = [rank for rank in range(3) if rank != victim]
    world.ask(death, range(3), victim=victim)
    for rank, (message, seconds) in world.answers(others).items():
        assert "the pipeline has stopped" in message, (rank, message)
        assert seconds < SOON


def with_a_smaller_batch(pipe, x, y):
    pipe.step(x[:4], y[:4])


def without_gradients(pipe, x, y):
    with torch.no_grad():
        pipe.step(x, y)


def without_a_target(pipe, x, _):
    pipe.step(x, None)


def with_a_dict(pipe, x, y):
    pipe.step({"x": x}, y)


def with_two_targets(pipe, x, y):
    pipe.step(x, (y, y))


def with_an_odd_batch(pipe, x, y):
    pipe.step(x[:6], y[:6])


def refused_steps(step, first):
    """Take a step that is refused, as the first one or not; return what it raises.

    Then take another one; return the largest difference of its gradients from those of the whole model.
    """
    pipe = Pipeline(make("linears"), loss_fn, microbatches=4, policy="fast_forward", timeout=20)
    x, y = batch("linears", seed=0)
    if not first:
        pipe.step(x, y)
        pipe.module.zero_grad()
    said = raised(lambda: step(pipe, x, y))
    pipe.step(x, y)
    stock = make("linears")
    stock_step(stock, "linears", 4, seed=0)
    grads = {n: p.grad for n, p in stock.named_parameters()}
    worst = max(float((p.grad - grads[n]).abs().max()) for n, p in pipe.module.named_parameters())
    pipe.close()
    return said, worst


@pytest.mark.parametrize(
    ("step", "first", "message"),
    [
        (with_a_smaller_batch, False, "leave the last, smaller batch out"),
        (without_gradients, False, "outside of that"),
        (without_a_target, True, "target=None: give a tensor"),
        (with_a_dict, True, "inputs='dict': give a tensor"),
        (with_two_targets, True, "target='tuple': give a tensor"),
        (with_an_odd_batch, True, "must be a multiple of the 4 micro-batches"),
    ],
)
def test_a_step_that_all_ranks_refuse_ends_nothing(two, step, first, message):
    for rank, (said, worst) in two.run(refused_steps, step=step, first=first).items():
        assert message in said, (rank, said)
        assert worst == 0


@pytest.mark.parametrize(("step", "first"), [(with_a_smaller_batch, False), (without_a_target, True)])
def test_ranks_that_need_nothing_of_a_batch_hear_of_it(three, step, first):
    for said, worst in three.run(refused_steps, step=step, first=first).values():
        assert "smaller batch" in said or "target=None" in said
        assert worst == 0


class Viewing(nn.Module):
    """A layer whose output is a view."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return self.linear(x.reshape(-1, 6)).view(-1, 2, 6)


def views(split, policy):
    """Return the largest difference of a gradient where all stages hand on views."""
    torch.manual_seed(0)
    layers = [Viewing() for _ in range(2 * dist.get_world_size())]
    torch.manual_seed(0)
    stock = nn.Sequential(*[Viewing() for _ in layers])
    x, y = torch.randn(8, 2, 6), torch.randn(8, 2, 6)
    pipe = Pipeline(nn.Sequential(*layers), loss_fn, microbatches=4, policy=policy, split=split, timeout=20)
    pipe.step(x, y)
    for one, other in zip(x.chunk(4), y.chunk(4), strict=True):
        (loss_fn(stock(one), other) / 4).backward()
    grads = {n: p.grad for n, p in stock.named_parameters()}
    worst = max(float((p.grad - grads[n]).abs().max()) for n, p in pipe.module.named_parameters())
    pipe.close()
    return worst


@pytest.mark.parametrize(("split", "policy"), [("torch", "fast_forward"), ("torch", "modulo"), ("fast", "modulo")])
def test_stages_may_hand_on_views(three, split, policy):
    assert set(three.run(views, split=split, policy=policy).values()) == {0.0}


def reentrant():
    """Return what a step raises with a checkpoint that cannot be split, and whether parameters have no gradient."""

    class Recomputed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x):
            return checkpoint(self.linear, x, use_reentrant=True)

    layers = [nn.Linear(6, 6), *(Recomputed() for _ in range(3))]
    pipe = Pipeline(nn.Sequential(*layers), loss_fn, microbatches=4, policy="fast_forward", timeout=20)
    said = raised(lambda: pipe.step(*batch("linears")))
    return said, [p.grad is None for p in pipe.module.parameters()]


def test_reentrant_checkpoints_are_refused(two):
    for said, left in two.run(reentrant).values():
        assert "use_reentrant=False" in said, said
        assert all(left)
