import pytest

from gradweave.parallel.daso.topology import Topology


def test_one_process_is_one_node():
    topology = Topology.of(None)
    assert (topology.nodes, topology.places, topology.rank) == (1, 1, 0)


def test_places():
    topology = Topology(((0, 1), (2, 3)), 1, 0)
    assert (topology.nodes, topology.places, topology.rank, topology.mate(1)) == (2, 2, 2, 3)


@pytest.mark.parametrize(("nodes", "places"), [(1, 2), (3, 1)])
def test_one_node_or_one_rank_per_node(tmp_path, nodes, places):
    from parallel.daso.worlds import World

    world = World(tmp_path, nodes, places)
    try:
        found = world.run("train", steps=8, every=3, wait=2)
        uneven = world.run("uneven", counts=[3, 7, 5], every=2, wait=1)
    finally:
        world.close()
    assert len({result["end"].sum().item() for result in found.values()}) == 1
    assert len({weights.sum().item() for weights, _ in uneven.values()}) == 1
    assert (found[0]["stats"]["exchanges"] > 0) == (nodes > 1)
