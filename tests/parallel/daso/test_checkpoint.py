"""Checkpoints, on the same nodes and on others."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gradweave.errors import ArgumentError, UnsupportedError
from gradweave.parallel.daso import DASO
from parallel.daso.training import (
    TIMEOUT,
    loss_of,
    one_step,
    setting,
    weights_of,
)
from worlds import World


def restarted(model, opt, daso, path, **options):
    """Save everything, throw it away, and load it into a new model, optimizer and DASO."""
    torch.save({"m": model.state_dict(), "o": opt.state_dict(), "d": daso.state_dict()}, path)
    dist.barrier()
    daso.detach()
    model, opt = setting()
    with torch.no_grad():
        [p.mul_(3) for p in model.parameters()]
    daso = DASO(model, opt, timeout=TIMEOUT, **options)
    loaded = torch.load(path)
    model.load_state_dict(loaded["m"])
    opt.load_state_dict(loaded["o"])
    daso.load_state_dict(loaded["d"])
    return model, opt, daso


def resume(*, at, steps, folder, **options):
    """Train in one go, and with everything thrown away and loaded again in the middle."""
    results = []
    for interrupted in (False, True):
        model, opt = setting()
        daso = DASO(model, opt, timeout=TIMEOUT, **options)
        for step in range(steps):
            if interrupted and step == at:
                path = Path(folder) / f"{at}-{dist.get_rank()}.pt"
                model, opt, daso = restarted(model, opt, daso, path, **options)
            one_step(model, opt, step)
        results.append(weights_of(model))
        dist.barrier()
        daso.finish()
        results.append(weights_of(model))
    return results


@pytest.mark.parametrize(("at", "every", "wait"), [(3, 4, 3), (5, 4, 3), (4, 2, 2), (1, 3, 1), (6, 6, 0)])
@pytest.mark.parametrize("options", [{}, {"payload": "float32", "warm_up": 2}])
def test_resuming_is_the_uninterrupted_run_bit_for_bit(two_by_two, tmp_path, at, every, wait, options):
    found = two_by_two.run(resume, at=at, steps=11, folder=str(tmp_path), every=every, wait=wait, **options)
    for whole, end, resumed, resumed_end in found.values():
        assert torch.equal(whole, resumed)
        assert torch.equal(end, resumed_end)


def test_resuming_the_published_rules(two_by_two, tmp_path):
    options = {"mode": "paper", "warm_up": 0, "cool_down": 0}
    found = two_by_two.run(resume, at=5, steps=9, folder=str(tmp_path), **options)
    assert all(torch.equal(whole, resumed) for whole, _, resumed, _ in found.values())


def save_under_way(*, steps, folder, **options):
    model, opt = setting()
    daso = DASO(model, opt, timeout=TIMEOUT, **options)
    for step in range(steps):
        one_step(model, opt, step)
    state = {"m": model.state_dict(), "o": opt.state_dict(), "d": daso.state_dict()}
    torch.save(state, Path(folder) / f"moved-{dist.get_rank()}.pt")
    dist.barrier()
    daso.detach()
    flight = state["d"]["flight"]
    return weights_of(model), None if flight is None else flight["total"] is not None


def load_elsewhere(*, folder, steps):
    """On other nodes than it was saved on: all ranks load the first one's."""
    model, opt = setting()
    daso = DASO(model, opt, timeout=TIMEOUT, every=2, wait=1)
    loaded = torch.load(Path(folder) / "moved-0.pt")
    model.load_state_dict(loaded["m"])
    opt.load_state_dict(loaded["o"])
    daso.load_state_dict(loaded["d"])
    begin = weights_of(model)
    for step in range(steps):
        one_step(model, opt, 100 + step)
    daso.finish()
    return begin, weights_of(model), daso.steps


@pytest.mark.parametrize(("nodes", "places"), [(3, 1), (1, 2), (1, 1)])
def test_resuming_on_other_nodes(two_by_two, tmp_path, nodes, places):
    saved = two_by_two.run(save_under_way, steps=4, folder=str(tmp_path), every=4, wait=4)
    assert saved[0][1], "the first rank carries what is under way"
    (tmp_path / "world").mkdir()
    world = World(tmp_path / "world", nodes, places)
    try:
        found = world.run(load_elsewhere, folder=str(tmp_path), steps=4)
    finally:
        world.close()
    begin, end, steps = found[0]
    assert steps >= 8
    assert not torch.equal(begin, saved[0][0]), "what had arrived is merged"
    assert torch.allclose(begin, saved[0][0], atol=0.5)
    assert all(torch.equal(begin, other[0]) and torch.equal(end, other[1]) for other in found.values())


def resume_unfrozen(*, folder):
    """The first layer is frozen at first; the restarted program does not freeze it any more."""
    results = []
    for interrupted in (False, True):
        model, opt = setting()
        model[0].requires_grad_(False)
        daso = DASO(model, opt, timeout=TIMEOUT, every=4, wait=3)
        for step in range(11):
            if step == 3:
                model[0].requires_grad_(True)
            if interrupted and step == 6:
                path = Path(folder) / f"unfrozen-{dist.get_rank()}.pt"
                model, opt, daso = restarted(model, opt, daso, path, every=4, wait=3)
            one_step(model, opt, step)
        results.append(weights_of(model))
        daso.finish()
    return results


def test_resuming_with_layers_that_were_unfrozen_on_the_way(two_by_two, tmp_path):
    for whole, resumed in two_by_two.run(resume_unfrozen, folder=str(tmp_path)).values():
        assert torch.equal(whole, resumed)


def save_after_a_skip(*, folder):
    """One node leaves out a step at which an exchange is due; all save right after it, and go on or resume."""
    results = []
    for interrupted in (False, True):
        model, opt = setting()
        daso = DASO(model, opt, timeout=TIMEOUT, every=2, wait=1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
        for step in range(8):
            loss = loss_of(model, dist.get_rank(), step)
            scaler.scale(loss * float("inf") if dist.get_rank() >= 2 and step == 4 else loss).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
            if interrupted and step == 4:
                path = Path(folder) / f"skip-{dist.get_rank()}.pt"
                model, opt, daso = restarted(model, opt, daso, path, every=2, wait=1)
        results.append(weights_of(model))
        daso.finish()
        results.append(weights_of(model))
    return results


def test_resuming_after_a_step_that_one_node_left_out(two_by_two, tmp_path):
    found = two_by_two.run(save_after_a_skip, folder=str(tmp_path))
    assert all(torch.equal(found[0][1], end) for _, end, _, _ in found.values())
    for whole, end, resumed, resumed_end in found.values():
        assert torch.equal(whole, resumed)
        assert torch.equal(end, resumed_end)


def resume_misfit():
    """Ranks that load checkpoints of different steps go on with the first one's."""
    model, opt = setting()
    daso = DASO(model, opt, timeout=TIMEOUT, every=2, wait=1)
    states = []
    for step in range(6):
        one_step(model, opt, step)
        states.append(copy.deepcopy((model.state_dict(), opt.state_dict(), daso.state_dict())))
    dist.barrier()
    chosen = states[3 if dist.get_rank() == 0 else 5]
    model.load_state_dict(chosen[0])
    opt.load_state_dict(chosen[1])
    daso.load_state_dict(chosen[2])
    begin, steps = weights_of(model), daso.steps
    for step in range(6, 10):
        one_step(model, opt, step)
    daso.finish()
    return begin, steps, weights_of(model)


def test_checkpoints_of_different_steps_do_not_mix(two_by_two):
    found = two_by_two.run(resume_misfit)
    assert {steps for _, steps, _ in found.values()} == {4}
    assert all(torch.equal(found[0][0], begin) and torch.equal(found[0][2], end) for begin, _, end in found.values())


def wrong_weights():
    model, opt = setting()
    daso = DASO(model, opt, timeout=TIMEOUT)
    state = daso.state_dict()
    with torch.no_grad():
        model[0].weight.add_(1)
    try:
        daso.load_state_dict(state)
    except (ArgumentError, UnsupportedError) as error:
        return str(error)
    finally:
        daso.detach()


def test_a_state_goes_with_its_weights(two_by_two):
    for said in two_by_two.run(wrong_weights).values():
        assert "load this rank's model and optimizer state after constructing DASO" in said
