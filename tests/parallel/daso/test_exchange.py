"""Exchanges between nodes, against a simulation of them in one process."""

import time
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from gradweave.errors import LostPeerError
from gradweave.parallel.daso import DASO
from parallel.daso.clock import die_as, without_a_clock
from parallel.daso.training import (
    TIMEOUT,
    loss_of,
    make_model,
    make_optimizer,
    one_step,
    setting,
    train,
    train_ddp,
    weights_of,
)
from reference.daso_simulation import make_nodes, simulate_delta, simulate_paper
from worlds import World


@pytest.mark.parametrize("payload", ["bfloat16", "float32"])
@pytest.mark.parametrize(("every", "wait"), [(1, 0), (1, 1), (3, 2), (4, 4), (5, 0)])
def test_every_step_is_the_simulation_bit_for_bit(two_by_two, payload, every, wait):
    steps = 11
    found = two_by_two.run(train, steps=steps, every=every, wait=wait, payload=payload, finish=False)
    expected = simulate_delta(
        make_nodes(2, 2, make_model, make_optimizer), loss_of,
        steps=steps, every=every, wait=wait, payload=getattr(torch, payload),
    )  # fmt: skip
    for rank, result in found.items():
        for step in range(steps):
            assert torch.equal(result["seen"][step], expected[step][rank // 2]), (rank, step)


def train_paper(*, epochs, epoch_steps, losses, **options):
    model, opt = setting()
    daso = DASO(model, opt, mode="paper", timeout=TIMEOUT, **options)
    seen, rhythm = [], []
    for epoch in range(epochs):
        rhythm.append((daso.rhythm[-1][1], daso.rhythm[-1][2]))
        for step in range(epoch_steps):
            one_step(model, opt, epoch * epoch_steps + step)
            seen.append(weights_of(model))
        daso.epoch_end(losses[epoch] + 0.1 * (dist.get_rank() - 1.5))
        seen.append(weights_of(model))
    daso.detach()
    return {"seen": torch.stack(seen), "rhythm": rhythm}


@pytest.mark.parametrize("payload", ["bfloat16", "float32"])
def test_the_published_rules_are_the_simulation_bit_for_bit(two_by_two, payload):
    losses = [1.0, 1.0, *[0.9] * 6, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9]
    common = {"epochs": len(losses), "epoch_steps": 6, "losses": losses, "warm_up": 1, "cool_down": 1}
    found = two_by_two.run(train_paper, **common, payload=payload, total=len(losses))
    expected, rhythm = simulate_paper(
        make_nodes(2, 2, make_model, make_optimizer), loss_of, **common, payload=getattr(torch, payload)
    )
    assert {(4, 1), (2, 1), (1, 1), (8, 2)} <= set(rhythm)
    for rank, result in found.items():
        assert result["rhythm"] == rhythm
        assert all(torch.equal(x, y[rank // 2]) for x, y in zip(result["seen"], expected, strict=True))


def test_without_waiting_it_is_data_parallel_for_sgd(two_by_two):
    stock = two_by_two.run(train_ddp, steps=12)[0]["seen"]
    for result in two_by_two.run(train, steps=12, every=1, wait=0, payload="float32").values():
        assert torch.allclose(result["seen"], stock, rtol=1e-6, atol=1e-7)


def test_in_the_cool_down_all_ranks_are_the_same_again(two_by_two):
    found = two_by_two.run(train, steps=12, every=3, wait=2, total=12, cool_down=4)
    assert not torch.equal(found[0]["seen"][6], found[2]["seen"][6])
    for step in range(8, 12):
        assert all(torch.equal(found[0]["seen"][step], found[rank]["seen"][step]) for rank in found)


def test_running_statistics_are_averaged_and_momentum_too(two_by_two):
    found = two_by_two.run(train, steps=9, kind="norm", every=2, wait=1)
    for rank in found:
        assert all(torch.equal(a, b) for a, b in zip(found[0]["buffers"][:2], found[rank]["buffers"][:2], strict=True))
        assert (found[rank]["buffers"][1] > 0).all()
        assert all(torch.equal(a, b) for a, b in zip(found[0]["state"], found[rank]["state"], strict=True))


def test_weights_are_never_rounded_to_16_bits(two_by_two):
    for result in two_by_two.run(train, steps=6, every=2, wait=1).values():
        assert not torch.equal(result["end"], result["end"].bfloat16().float())


def test_a_recorded_rhythm_is_replayed_bit_for_bit(two_by_two):
    first = two_by_two.run(train, steps=30)
    again = two_by_two.run(train, steps=30, rhythm=first[0]["rhythm"])
    assert all(torch.equal(first[rank]["seen"], again[rank]["seen"]) for rank in first)


def progress(*, mode, every, wait, steps):
    """Return weights after each step with the same gradient and a rate of 1: SGD moves them by 1."""
    model = nn.Linear(4, 1, bias=False)
    nn.init.zeros_(model.weight)
    opt = torch.optim.SGD(model.parameters(), lr=1.0)
    options = {"every": every, "wait": wait} if mode == "delta" else {"warm_up": 0, "cool_down": 0}
    daso = DASO(model, opt, mode=mode, payload="float32", timeout=TIMEOUT, **options)
    seen = []
    for _ in range(steps):
        model.weight.sum().neg().backward()
        opt.step()
        opt.zero_grad()
        seen.append(float(model.weight.detach().mean()))
    dist.barrier()
    daso.detach()
    return seen


@pytest.mark.parametrize(
    ("mode", "every", "wait", "share"),
    [("delta", 4, 1, 1.0), ("delta", 1, 1, 1.0), ("delta", 4, 4, 1.0), ("paper", 4, 1, 0.875)],
)
def test_progress_while_an_exchange_is_under_way(two_by_two, mode, every, wait, share):
    """The published merge keeps 2S/(2S+P) of what is done meanwhile; ours keeps all of it."""
    for seen in two_by_two.run(progress, mode=mode, every=every, wait=wait, steps=41).values():
        assert (seen[40] - seen[8]) / 32 == pytest.approx(share, abs=1e-6)


def paper_in_turn(*, steps, die=None, **options):
    """One rank per node by the published rules, at B = 1 and W = 1: two exchanges are under way at a time."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("node", "local"))
    model = make_model()
    opt = make_optimizer(model.parameters())
    options = {"timeout": 5, "checkpoint_dir": f"paper-{dist.get_rank()}", **options}
    with without_a_clock() if die else nullcontext(lambda _: None) as knows:
        daso = DASO(model, opt, mesh, mode="paper", warm_up=0, every=1, **options)
        knows(daso)
    for epoch in range(7):
        one_step(model, opt, epoch)
        daso.epoch_end(1.0)
    assert (daso.stats()["every"], daso.stats()["wait"]) == (1, 1)
    stalls, said = 0, None
    try:
        for number in range(steps):
            if die is not None and die[0] == dist.get_rank() and die[1] == number:
                die_as(dist.get_rank())
            began = time.monotonic()
            one_step(model, opt, number)
            stalls += time.monotonic() - began > options["timeout"] - 1
        daso.finish()
    except LostPeerError as error:
        said = str(error)
    return said, stalls, daso.stats()["failed_exchanges"], weights_of(model)


def test_two_exchanges_at_a_time_do_not_wait_for_each_other(two_by_two):
    found = two_by_two.run(paper_in_turn, steps=40)
    assert [result[:3] for result in found.values()] == [(None, 0, 0)] * 4
    assert all(torch.equal(found[0][3], weights) for *_, weights in found.values())


def test_two_exchanges_that_fail_at_a_time_leave_the_others_together(tmp_path):
    world = World(tmp_path, 3, 1)
    try:
        world.ask(paper_in_turn, range(3), steps=30, die=(1, 7), on_failure="continue")
        found = world.answers([0, 2])
    finally:
        world.close()
    assert [result[0] for result in found.values()] == [None, None]
    assert [result[2] for result in found.values()] == [1, 1], (
        "the second one counts for no node, and the roll is not called again"
    )
    assert torch.equal(found[0][3], found[2][3])
