"""Loops as users write them, on two nodes of two ranks."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from gradweave.parallel.daso import DASO
from gradweave.parallel.daso.training_loop import StepState
from gradweave.reordering import reorder
from parallel.daso.training import (
    TIMEOUT,
    loss_of,
    make_batch,
    make_model,
    make_optimizer,
    one_step,
    said_by,
    same_everywhere,
    setting,
    train,
    weights_of,
)


def test_a_step_counts_if_gradients_were_averaged_before_or_inside_of_it():
    clear = StepState.CLEAR
    inside = clear.after_step_begin()
    assert not inside.has_gradients
    assert inside.after_backward() is clear.after_backward().after_step_begin() is StepState.STEPPING_AVERAGED
    assert clear.after_backward().after_backward() is StepState.AVERAGED
    assert StepState.STEPPING_AVERAGED.after_backward() is StepState.STEPPING_AVERAGED


def accumulation(*, declared):
    """Two micro-batches a step, with and without saying so; both must be one step each."""
    model, opt = setting()
    daso = DASO(model, opt, timeout=TIMEOUT, every=2, wait=1, payload="float32")
    for step in range(6):
        for micro in range(2):
            loss = loss_of(model, dist.get_rank(), 2 * step + micro) / 2
            if declared and micro == 0:
                with daso.no_update():
                    loss.backward()
            else:
                loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        opt.zero_grad()
    steps = daso.steps
    daso.finish()
    return weights_of(model), steps, norm


def test_accumulation_counts_steps_declared_or_not(two_by_two):
    declared = two_by_two.run(accumulation, declared=True)
    silent = two_by_two.run(accumulation, declared=False)
    for found in (declared, silent):
        assert same_everywhere(found, 0)
        assert {steps for _, steps, _ in found.values()} == {6}
    assert torch.allclose(declared[0][0], silent[0][0], rtol=1e-5, atol=1e-6)
    assert declared[0][2] == pytest.approx(float(declared[1][2]))


def scaled(*, steps, broken, agreed=False, **options):
    """GradScaler's skips: one node sees an infinity in some steps."""
    model, opt = setting()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
    options = {**options, "scaler": scaler} if agreed else options
    daso = DASO(model, opt, timeout=TIMEOUT, every=2, wait=1, **options)
    skipped = 0
    for step in range(steps):
        loss = loss_of(model, dist.get_rank(), step)
        if dist.get_rank() == 3 and step in broken:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        before = weights_of(model)
        scaler.step(opt)
        skipped += int(torch.equal(before, weights_of(model)))
        scaler.update()
        opt.zero_grad()
    counted, last = daso.steps, weights_of(model)
    daso.finish()
    return weights_of(model), skipped, counted, scaler.get_scale(), last


def test_steps_left_out_by_gradient_scaling_keep_everybody_in_step(two_by_two):
    found = two_by_two.run(scaled, steps=9, broken=[2, 3, 8])
    assert same_everywhere(found, 0)
    assert [found[rank][1] for rank in range(4)] == [0, 0, 3, 3]
    assert [found[rank][3] for rank in range(4)] == [8.0, 8.0, 1.0, 1.0]
    assert {found[rank][2] for rank in (0, 1)} == {9}
    assert {found[rank][2] for rank in (2, 3)} == {8}, "the last one, left out, ends with finish()"


def test_nodes_agree_on_a_scale_before_they_average_scaled_gradients(two_by_two):
    found = two_by_two.run(scaled, steps=9, broken=[2, 3], agreed=True, total=9, cool_down=4)
    assert len({found[rank][3] for rank in found}) == 1
    assert same_everywhere(found, 4), "in the cool-down all nodes take the same steps"


def new_parameters():
    """A layer that comes in late, with other values on every rank."""
    model, opt = setting()
    daso = DASO(model, opt, timeout=TIMEOUT, every=2, wait=1)
    for step in range(7):
        if step == 3:
            torch.manual_seed(dist.get_rank())
            model.append(nn.Linear(3, 3))
            opt.add_param_group({"params": list(model[-1].parameters())})
        one_step(model, opt, step)
    daso.finish()
    return weights_of(model)


def test_parameters_that_were_not_there_at_the_start(two_by_two):
    assert same_everywhere(two_by_two.run(new_parameters), None)


def unfreezes(*, layers):
    """Each rank begins to train a layer of its own choice: when it hears of others, and whether weights had moved."""
    model = make_model()
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    opt = make_optimizer(model.parameters())
    daso = DASO(model, opt, every=2, wait=1, timeout=TIMEOUT, checkpoint_dir=f"unfreezes-{dist.get_rank()}")
    said = None
    for number in range(6):
        if number == 3:
            (model[0] if layers[dist.get_rank()] == 0 else model[2].bias).requires_grad_(True)
        before = weights_of(model)
        said = said_by(lambda now=number: one_step(model, opt, now))
        if said is not None:
            break
    moved = said is not None and not torch.equal(before, weights_of(model))
    if said is None:
        daso.finish()
    daso.detach()
    return said, number, moved


@pytest.mark.parametrize("layers", [(0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 1, 1)])
def test_layers_that_only_some_ranks_begin_to_train_are_refused_by_all(two_by_two, layers):
    found = two_by_two.run(unfreezes, layers=layers)
    if layers == (0, 0, 0, 0):
        assert [each for each, *_ in found.values()] == [None] * 4
        return
    for rank, (said, number, moved) in found.items():
        assert f"trained from now on, on rank {rank}, and not so on rank" in said
        assert (number, moved) == (3, False)


def without_backward(*, how):
    """Gradients that no backward of ours has seen the end of."""
    model, opt = setting()
    daso = DASO(model, opt, timeout=TIMEOUT, every=2, wait=1)
    for step in range(6):
        loss = loss_of(model, dist.get_rank(), step)
        if how == "no_sync":
            with daso.no_sync():
                loss.backward()
        else:
            for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
                if p.grad is None or how == "grad":
                    p.grad = g
                else:
                    p.grad.copy_(g)
        opt.step()
        if how != "in place":
            opt.zero_grad()
    counted = daso.steps
    daso.finish()
    return weights_of(model), counted


@pytest.mark.parametrize("how", ["no_sync", "grad", "in place"])
def test_gradients_without_a_backward_are_averaged_when_the_step_begins(two_by_two, how):
    found = two_by_two.run(without_backward, how=how)
    plain = two_by_two.run(train, steps=6, every=2, wait=1)
    assert {counted for _, counted in found.values()} == {6}
    assert all(torch.equal(found[rank][0], plain[rank]["end"]) for rank in found)


def several_backwards():
    """Gradients of each loss by themselves, with the graph kept."""
    model, opt = setting()
    daso = DASO(model, opt, timeout=TIMEOUT, every=1, wait=1)
    for step in range(8):
        loss = loss_of(model, dist.get_rank(), step)
        with daso.no_sync():
            for _ in range(2):
                loss.backward(retain_graph=True)
                opt.zero_grad()
        loss.backward()
        opt.step()
        opt.zero_grad()
    daso.finish()
    return weights_of(model)


def test_several_backwards_with_a_graph_that_is_kept(two_by_two):
    assert same_everywhere(two_by_two.run(several_backwards), None)


def odd_parameters(*, steps):
    """Frozen, tied, of several dtypes, strided, empty and complex ones, and one that is unfrozen late."""
    torch.manual_seed(1)

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(6, 6)
            self.tied = self.first.weight
            self.narrow = nn.Parameter(torch.randn(6, dtype=torch.bfloat16))
            self.wide = nn.Parameter(torch.randn(6, dtype=torch.float64))
            self.strided = nn.Parameter(torch.randn(3, 6).t())
            self.empty = nn.Parameter(torch.zeros(0, 4))
            self.wave = nn.Parameter(torch.randn(6, dtype=torch.complex64))
            self.late = nn.Parameter(torch.randn(6), requires_grad=False)
            self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
            self.unused = nn.Parameter(torch.randn(3))
            self.added = torch.ones(3, requires_grad=True)

        def forward(self, x):
            x = self.first(x) @ self.tied + self.narrow.float() + self.wide.float() + self.wave.abs()
            return (x + self.late + self.frozen) @ self.strided + self.empty.sum() + self.added

    model = Odd()
    opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    before = model.frozen.clone(), model.unused.clone(), model.late.clone()
    daso = DASO(model, opt, timeout=TIMEOUT, every=3, wait=2, payload="float32")
    for step in range(steps):
        if step == steps // 2:
            model.late.requires_grad_(True)
            opt.add_param_group({"params": [model.added]})
        x, y = make_batch(dist.get_rank(), step)
        F.cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad()
        if step == steps // 2:
            first = torch.cat([model.late, model.added]).detach().clone()
    daso.finish()
    kept = [torch.equal(a, b) for a, b in zip(before, (model.frozen, model.unused, model.late), strict=True)]
    return {**{name: p.detach() for name, p in model.named_parameters()}, "added": model.added.detach()}, kept, first


def test_odd_parameters(two_by_two):
    found = two_by_two.run(odd_parameters, steps=8)
    for node in range(2):
        assert torch.equal(found[2 * node][2], found[2 * node + 1][2]), "averaged from the first backward on"
    for params, (frozen, unused, late), _ in found.values():
        assert frozen
        assert unused
        assert not late
        assert all(torch.equal(value, found[0][0][name]) for name, value in params.items())


def closure(*, steps):
    """Optimizers that are given a closure, as Lightning does; and a copy of the model stays out of it."""
    model, opt = setting()
    daso = DASO(model, opt, timeout=TIMEOUT, every=2, wait=1)
    for step in range(steps):

        def run(step=step):
            opt.zero_grad()
            loss = loss_of(model, dist.get_rank(), step)
            loss.backward()
            return loss

        opt.step(run)
    copied = copy.deepcopy(model)
    loss_of(copied, dist.get_rank(), 0).backward()
    counted = daso.steps
    daso.finish()
    return weights_of(model), counted


def test_closures(two_by_two):
    found = two_by_two.run(closure, steps=6)
    plain = two_by_two.run(train, steps=6, every=2, wait=1)
    assert all(torch.equal(found[rank][0], plain[rank]["end"]) for rank in found)
    assert {steps for _, steps in found.values()} == {6}


def compiled(*, steps, first):
    """A model under torch.compile, which is called before or after DASO."""
    model, opt = setting()
    fast = torch.compile(model, backend="aot_eager") if first else model
    daso = DASO(fast, opt, timeout=TIMEOUT, every=2, wait=1)
    fast = fast if first else torch.compile(model, backend="aot_eager")
    for step in range(steps):
        one_step(fast, opt, step)
    daso.finish()
    return weights_of(model), daso.steps


@pytest.mark.parametrize("first", [True, False])
def test_a_compiled_model(two_by_two, first):
    found = two_by_two.run(compiled, steps=6, first=first)
    plain = two_by_two.run(train, steps=6, every=2, wait=1)
    assert all(torch.allclose(found[rank][0], plain[rank]["end"], rtol=1e-5, atol=1e-6) for rank in found)


def reordered(*, steps, first):
    """A model whose weight gradients are computed late."""
    model, opt = setting()
    if first:
        reorder(model, policy="side_stream")
    daso = DASO(model, opt, timeout=TIMEOUT, every=2, wait=1)
    if not first:
        reorder(model, policy="side_stream")
    for step in range(steps):
        one_step(model, opt, step)
    daso.finish()
    return weights_of(model)


@pytest.mark.parametrize("first", [True, False])
def test_a_reordered_model(two_by_two, first):
    found = two_by_two.run(reordered, steps=6, first=first)
    plain = two_by_two.run(train, steps=6, every=2, wait=1)
    assert all(torch.equal(found[rank], plain[rank]["end"]) for rank in found)


def reentrant(*, steps):
    """Checkpointed segments run backwards inside of backward."""
    from torch.utils.checkpoint import checkpoint

    model, opt = setting()
    daso = DASO(model, opt, timeout=TIMEOUT, every=2, wait=1, payload="float32")
    for step in range(steps):
        x, y = make_batch(dist.get_rank(), step)
        x.requires_grad_(True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            F.cross_entropy(checkpoint(model, x, use_reentrant=True), y).backward()
        opt.step()
        opt.zero_grad()
    counted = daso.steps
    daso.finish()
    return weights_of(model), counted


def test_reentrant_checkpointing(two_by_two):
    found = two_by_two.run(reentrant, steps=6)
    plain = two_by_two.run(train, steps=6, every=2, wait=1, payload="float32")
    assert {steps for _, steps in found.values()} == {6}
    assert all(torch.allclose(found[rank][0], plain[rank]["end"], rtol=1e-5, atol=1e-6) for rank in found)
