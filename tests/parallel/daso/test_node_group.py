"""Collectives inside a node."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from gradweave.parallel.daso.node_group import NodeGroup, Purpose
from gradweave.parallel.daso.topology import Groups, Topology
from parallel.daso.training import TIMEOUT


def meet(*, step, active):
    """Ranks of a node meet; those at the active places still train."""
    topology, limit = Topology.of(None), timedelta(seconds=TIMEOUT)
    groups = Groups(topology, torch.device("cpu"), timeout=limit, node_timeout=limit)
    vectors = [torch.full((3,), 1.0 + dist.get_rank()), torch.ones(2, dtype=torch.float64)]
    trains = topology.place in active
    meeting = NodeGroup(topology, groups).gather(Purpose.BACKWARD, step, [1, 0], vectors, active=trains)
    groups.close()
    return meeting, vectors


@pytest.mark.parametrize("active", [(0, 1), (1,), ()])
@pytest.mark.parametrize("step", [0, 4095, 2**33 + 4097])
def test_a_meeting_sums_vectors_and_tells_who_trains_and_at_which_step(two_by_two, active, step):
    for rank, (meeting, vectors) in two_by_two.run(meet, step=step, active=active).items():
        assert meeting.active == active
        assert meeting.purpose is (Purpose.BACKWARD if active else Purpose.LEAVE)
        assert meeting.step == step
        assert meeting.fresh == (len(active), 0)
        assert [vector.tolist() for vector in vectors] == [[3.0 if rank < 2 else 7.0] * 3, [2.0] * 2]
