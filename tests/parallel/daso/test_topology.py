from gradweave.parallel.daso.topology import Topology


def test_one_process_is_one_node():
    topology = Topology.of(None)
    assert (topology.nodes, topology.places, topology.rank, topology.is_first) == (1, 1, 0, True)


def test_places():
    topology = Topology(((0, 1), (2, 3)), 1, 0)
    assert (topology.nodes, topology.places, topology.rank, topology.rank_at(1)) == (2, 2, 2, 3)
    assert not topology.is_first
