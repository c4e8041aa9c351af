"""The end of training, on ranks that run out of batches at different steps or leave in other ways."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from gradweave.parallel.daso import DASO
from parallel.daso.training import (
    TIMEOUT,
    loss_of,
    make_model,
    make_optimizer,
    one_step,
    same_everywhere,
    setting,
    train,
    weights_of,
)
from worlds import World, free_port

OPTIONS = [
    {"every": 3, "wait": 2},
    {"warm_up": 20},
    {"warm_up": 6, "every": 2, "wait": 1},
    {"total": 9, "cool_down": 3},
    {"total": 9, "cool_down": 4, "every": 2, "wait": 1},
    {},
]


COUNTS = [[5, 5, 5, 5], [9, 9, 4, 4], [6, 9, 9, 7], [0, 8, 3, 0], [0, 0, 7, 7], [0, 0, 0, 0]]


def uneven(*, counts, **options):
    """Every rank has its own number of batches."""
    model, opt = setting()
    with DASO(model, opt, timeout=TIMEOUT, **options) as daso:
        for step in range(counts[dist.get_rank()]):
            one_step(model, opt, step)
    return weights_of(model), daso.steps


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("counts", COUNTS)
def test_uneven_counts_end_cleanly_with_the_same_weights(two_by_two, counts, options):
    found = two_by_two.run(uneven, counts=counts, **options)
    assert all(torch.equal(found[0][0], weights) for weights, _ in found.values())
    assert torch.isfinite(found[0][0]).all()
    assert all(steps >= max(counts) for _, steps in found.values())


@pytest.mark.parametrize(("nodes", "places"), [(1, 2), (3, 1)])
def test_one_node_or_one_rank_per_node(tmp_path, nodes, places):
    world = World(tmp_path, nodes, places)
    try:
        found = world.run(train, steps=8, every=3, wait=2)
        ended = world.run(uneven, counts=[3, 7, 5], every=2, wait=1)
    finally:
        world.close()
    assert same_everywhere(found)
    assert same_everywhere(ended, 0)
    assert (found[0]["stats"]["exchanges"] > 0) == (nodes > 1)


def uneven_skip():
    """The last batch that all ranks have is left out, and some ranks have one more."""
    model, opt = setting()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with DASO(model, opt, timeout=TIMEOUT, every=2, wait=1, scaler=scaler):
        for step in range([5, 6, 5, 5][dist.get_rank()]):
            loss = loss_of(model, dist.get_rank(), step)
            scaler.scale(loss * float("inf") if step == 4 else loss).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
    return weights_of(model)


def test_a_step_left_out_before_some_ranks_run_out(two_by_two):
    assert same_everywhere(two_by_two.run(uneven_skip), None)


def one_node():
    """Four ranks of one node, with running statistics: everything is the same at the end, and steps are counted."""
    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("node", "local"))
    model = make_model("norm")
    opt = make_optimizer(model.parameters())
    daso = DASO(model, opt, mesh, timeout=TIMEOUT)
    for number in range(5):
        one_step(model, opt, number)
    daso.finish()
    return torch.cat([b.float().reshape(-1) for b in model.buffers()]), daso.steps


def test_one_node_ends_with_the_same_statistics(two_by_two):
    found = two_by_two.run(one_node)
    assert all(torch.equal(found[0][0], statistics) for statistics, _ in found.values())
    assert {steps for _, steps in found.values()} == {5}


def steps_counted(*, counts):
    """Standing by is no training."""
    model = make_model()
    opt = make_optimizer(model.parameters())
    with DASO(model, opt, every=4, wait=2, timeout=TIMEOUT) as daso:
        for number in range(counts[dist.get_rank()]):
            one_step(model, opt, number)
    return daso.steps, daso.stats()["steps"]


@pytest.mark.parametrize("counts", [[7, 7, 7, 7], [7, 7, 3, 3], [6, 7, 7, 5]])
def test_standing_by_does_not_count_as_training(two_by_two, counts):
    assert set(two_by_two.run(steps_counted, counts=counts).values()) == {(7, 7)}


def run_to_the_end(folder, how):
    """Run the program on two ranks; return their processes, which have ended, and what they wrote."""
    port, processes = str(free_port()), []
    for rank in range(2):
        own = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        path = f"{Path(__file__).parents[3] / 'src'}:{Path(__file__).parents[2]}"
        given = {**os.environ, **own, "MASTER_PORT": port, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        call = [sys.executable, str(Path(__file__).parent / "program.py"), how]
        processes.append(
            subprocess.Popen(call, env=given, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    try:
        said = [process.communicate(timeout=100)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return processes, said


@pytest.mark.parametrize("how", ["finish", "destroyed before", "neither"])
def test_a_program_that_trained_well_ends_well(tmp_path, how):
    # As for DataParallel: torch may abort a program that leaves the default group to the interpreter's end.
    for _ in range(3 if how == "neither" else 1):
        processes, said = run_to_the_end(tmp_path, how)
        if all(process.returncode == 0 for process in processes):
            break
    assert [process.returncode for process in processes] == [0, 0], said
    assert ["trained" in text for text in said] == [True, True]
    assert not any("terminate" in text for text in said)
