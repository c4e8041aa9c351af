import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradweave.errors import ArgumentError
from gradweave.schedule import Cluster, Demand, Link


@pytest.mark.parametrize(
    ("text", "bandwidth", "latency"),
    [
        ("free", math.inf, 0.0),
        ("8bit/s", 1.0, 0.0),
        ("1B/s", 1.0, 0.0),
        ("25Gbit/s", 25e9 / 8, 0.0),
        ("25Gbit/s,10us", 25e9 / 8, 10e-6),
        ("3GB/s, 2ms", 3e9, 2e-3),
        ("1.5MiB/s,0.5s", 1.5 * 2**20, 0.5),
        ("1e3kB/s,7ns", 1e6, 7e-9),
    ],
)
def test_parse(text, bandwidth, latency):
    link = Link.parse(text)
    assert link.bandwidth == pytest.approx(bandwidth)
    assert link.latency == pytest.approx(latency)


@pytest.mark.parametrize(
    "text", ["", "fast", "25", "25Gbit", "0Gbit/s", "-1B/s", "1B/s,", "1B/s,x", "1.2.3B/s", "1Qbit/s"]
)
def test_parse_names_what_it_cannot_read(text):
    if text == "1B/s,":
        assert Link.parse(text) == Link(1.0)
        return
    with pytest.raises(ArgumentError, match="25Gbit/s") as error:
        Link.parse(text)
    assert error.value.argument == "link"
    assert error.value.value == text


@given(st.integers(0, 10**9), st.integers(2, 2048))
def test_all_reduce_moves_what_a_ring_must(size, ranks):
    link = Link(bandwidth=1e9, latency=1e-6)
    expected = 2 * (ranks - 1) / ranks * size / 1e9 + 2 * math.ceil(math.log2(ranks)) * 1e-6
    assert link.all_reduce_seconds(size, ranks) == pytest.approx(expected)


def test_alone_there_is_nothing_to_reduce():
    assert Link(1.0, 1.0).all_reduce_seconds(1000, 1) == 0.0


def test_a_message_pays_latency_and_bytes():
    assert Link(10.0, 0.5).transfer_seconds(20) == 2.5
    assert Link().free
    assert not Link(latency=1e-9).free


@pytest.mark.parametrize(
    "arguments", [{"bandwidth": 0}, {"bandwidth": -1}, {"bandwidth": math.nan}, {"latency": -1}, {"device_seconds": -1}]
)
def test_senseless_links_are_rejected(arguments):
    with pytest.raises(ArgumentError, match=next(iter(arguments))):
        Link(**arguments)


def test_what_an_all_reduce_takes_of_the_device():
    link = Link(bandwidth=10.0, device_seconds=0.05)
    assert link.all_reduce_demand(100, 2) == Demand(0.5, 0.5)
    assert Link(10.0, device_seconds=1.0).all_reduce_demand(100, 2) == Demand(1.0, 1.0)
    assert Link(10.0).all_reduce_demand(100, 2) == Demand(0.0, 0.0)
    assert link.all_reduce_demand(100, 1) == Demand(0.0, 0.0)


def test_devices_are_spread_evenly_over_nodes():
    assert Cluster(8, nodes=2).local_ranks == 4
    with pytest.raises(ArgumentError, match="nodes=3"):
        Cluster(8, nodes=3)
    with pytest.raises(ArgumentError, match="devices=0"):
        Cluster(0)
