"""Groups of some of the ranks: refused where torch would have their members wait for each other for ever.

A function above a test runs on every rank, and returns what its test looks at.
"""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from gradweave._compat.distributed import group_count
from gradweave._runtime.peers.groups import common_name, end_group, new_group
from gradweave.errors import GradweaveError
from gradweave.parallel.daso import DASO
from gradweave.parallel.pipeline import Pipeline
from worlds import World

SOON = 30


@pytest.fixture
def three(tmp_path):
    world = World(tmp_path, 3, 1)
    yield world
    world.close()


def _of_two(mesh, group):
    """Return a mesh of the first two ranks, one per node."""

    class Mesh:
        mesh_dim_names = ("node", "local")
        get_group = staticmethod({"node": group, "local": mesh.get_group("local")}.__getitem__)

    Mesh.mesh = mesh.mesh[:2]
    return Mesh


def uneven_counts(*, technique):
    """Put the first rank in a group more than the second; return what a technique on the two raises, and how soon."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (3, 1), mesh_dim_names=("node", "local"))
    two = dist.new_group([0, 1])
    if rank == 2:
        return None
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    began = time.monotonic()
    try:
        if technique == "a pipeline":
            Pipeline(model, nn.functional.mse_loss, microbatches=2, process_group=two)
        else:
            DASO(model, torch.optim.SGD(model.parameters(), lr=0.1), _of_two(mesh, two))
    except GradweaveError as error:
        return str(error), time.monotonic() - began
    return None


@pytest.mark.parametrize("technique", ["a pipeline", "DASO"])
def test_a_group_of_ranks_that_are_in_different_numbers_of_groups_is_refused_at_once(three, technique):
    found = three.run(uneven_counts, technique=technique)
    for rank in (0, 1):
        message, seconds = found[rank]
        assert message.startswith(f"{technique} on some of the ranks: its ranks are in ")
        assert message.endswith("have all of these ranks make the same groups before")
        assert seconds < SOON


def makes_groups():
    """Make groups of all ranks and of some; return members, common names, and how many are left after ending them."""
    before = group_count()
    everyone = new_group([range(3)], made_by_all=True)
    first, second = (common_name("test", everyone) for _ in range(2))
    family = new_group([[0, 2], [1]], made_by_all=True)
    members = dist.get_process_group_ranks(family)
    for group in (everyone, family):
        end_group(group)
    ended = group_count() - before
    kept = [new_group([range(3)], made_by_all=True)]
    if dist.get_rank() < 2:
        kept.append(new_group([[0, 1]], made_by_all=False))
    for group in kept:
        end_group(group)
    return members, (first, second), ended, group_count() - before


def test_groups_end_unless_torch_would_give_a_name_twice(three):
    found = three.run(makes_groups)
    assert [members for members, *_ in found.values()] == [[0, 2], [1], [0, 2]]
    names = {names for _, names, _, _ in found.values()}
    assert len(names) == 1
    assert len(set(names.pop())) == 2
    assert [ended for _, _, ended, _ in found.values()] == [0, 0, 0]
    assert [left for *_, left in found.values()] == [2, 2, 0]
