"""Links as measured by all-reduces and by messages there and back: the same on all ranks, and what messages take.

A function above a test runs on every rank, and returns what its test looks at.
"""

import time

import pytest
import torch
import torch.distributed as dist

from gradweave._runtime.peers import link
from gradweave._runtime.peers.link import measure_all_reduce, measure_round_trip
from gradweave.errors import LostPeerError
from gradweave.schedule import Link
from worlds import World

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    world = World(tmp_path_factory.mktemp("two"), 2, 1)
    yield world
    world.close()


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    world = World(tmp_path_factory.mktemp("three"), 3, 1)
    yield world
    world.close()


def measured(*, pattern, bandwidths=None, latency=0.0):
    """Measure a link with real messages, or with messages that take as long as each rank's own link says."""
    known = None if bandwidths is None else Link(bandwidths[dist.get_rank()], latency)
    stock = link._all_reduce_seconds, link._round_trip_seconds
    if known is not None:
        ranks = dist.get_world_size()
        link._all_reduce_seconds = lambda _, __, elements: (known.all_reduce_seconds(4 * elements, ranks), 1)
        link._round_trip_seconds = lambda _, __, size: (2 * known.transfer_seconds(size), 1)
    try:
        found = measure_all_reduce(None, CPU, 2**24) if pattern == "all-reduce" else measure_round_trip(None, CPU)
    finally:
        link._all_reduce_seconds, link._round_trip_seconds = stock
    return {"bandwidth": found.bandwidth, "latency": found.latency, "device_seconds": found.device_seconds}


@pytest.mark.parametrize("pattern", ["all-reduce", "there and back"])
def test_a_link_is_that_of_the_slowest_rank_on_all_ranks(two, pattern):
    """And what it is measured to be is what its messages take."""
    for found in two.run(measured, pattern=pattern, bandwidths=[4e8, 1e8], latency=2e-3).values():
        assert found["bandwidth"] == pytest.approx(1e8)
        assert found["latency"] == pytest.approx(2e-3)
        assert found["device_seconds"] >= 0


@pytest.mark.parametrize("pattern", ["all-reduce", "there and back"])
def test_a_link_is_measured_with_real_messages(three, pattern):
    """All ranks have the same of it, to the last digit, those that only look on included."""
    found = three.run(measured, pattern=pattern)
    assert found[0] == found[1] == found[2]
    assert found[0]["bandwidth"] > 0
    assert found[0]["latency"] >= 0
    assert 0 <= found[0]["device_seconds"] < 1e-3
    assert pattern != "all-reduce" or found[0]["device_seconds"] > 0


def over_a_slow_link(*, pattern, bytes_per_second, model_bytes):
    """Measure a slow link; return its bandwidth, how much was sent to measure it, and how long that took."""
    sent, began = [], time.monotonic()

    def slowly(stock):
        def call(tensor, *args, **kwargs):
            sent.append(tensor.nbytes)
            time.sleep(tensor.nbytes / bytes_per_second)
            return stock(tensor, *args, **kwargs)

        return call

    stock = dist.all_reduce, dist.send
    dist.all_reduce, dist.send = map(slowly, stock)
    try:
        found = measure_all_reduce(None, CPU, model_bytes) if pattern == "all-reduce" else measure_round_trip(None, CPU)
    finally:
        dist.all_reduce, dist.send = stock
    return {"sent": sum(sent), "bandwidth": found.bandwidth, "seconds": time.monotonic() - began}


def test_a_slow_link_is_measured_with_no_more_than_a_few_steps_send(two):
    arguments = {"pattern": "all-reduce", "bytes_per_second": 125_000, "model_bytes": 160_000}
    for found in two.run(over_a_slow_link, **arguments).values():
        assert found["sent"] < 4 * 160_000
        assert 50_000 < found["bandwidth"] < 500_000


def test_messages_there_and_back_do_not_grow_beyond_what_a_slow_link_carries(two):
    arguments = {"pattern": "there and back", "bytes_per_second": 1e6, "model_bytes": 0}
    for found in two.run(over_a_slow_link, **arguments).values():
        assert found["sent"] < 4e6
        assert found["seconds"] < 20
        assert 4e5 < found["bandwidth"] < 2e6


def test_one_rank_has_a_free_link(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert measure_round_trip(None, CPU) == Link()
    finally:
        dist.destroy_process_group()


def test_an_error_of_a_message_beside_a_computation_comes_up(monkeypatch):
    def fails():
        raise LostPeerError("a rank is lost")

    monkeypatch.setattr(dist, "barrier", lambda group: None)
    with pytest.raises(LostPeerError):
        link._seconds_lost_beside(fails, None, 1)
