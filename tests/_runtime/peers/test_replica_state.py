"""Replicas that hold the same on all ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradweave._runtime.peers.replica_state import BufferBroadcast
from worlds import World


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two ranks."""
    world = World(tmp_path_factory.mktemp("two"), 2, 1)
    yield world
    world.close()


def broadcasts_buffers():
    model = nn.Module()
    model.register_buffer("value", torch.full((3,), float(dist.get_rank())))
    model.register_buffer("count", torch.tensor(7 + dist.get_rank()))
    BufferBroadcast(model, dist.group.WORLD).run()
    return {name: value.clone() for name, value in model.named_buffers()}


def test_all_ranks_have_the_buffers_of_the_first(two):
    shared = two.run(broadcasts_buffers)
    assert all(torch.equal(shared[rank]["value"], torch.zeros(3)) for rank in range(2))
    assert all(shared[rank]["count"].item() == 7 for rank in range(2))
