"""A real link between two network namespaces that is cut; needs root, and says so where it is not."""

import importlib.util
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from parallel.daso.faults import faulty
from parallel.daso.training import train
from worlds import World

_PATH = Path(__file__).parents[3] / "benchmarks" / "namespaces.py"


def _namespaces():
    spec = importlib.util.spec_from_file_location("namespaces", _PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def link():
    if not _PATH.exists() or sys.platform != "linux":
        pytest.skip("needs the namespaces of benchmarks, and Linux")
    namespaces = _namespaces()
    try:
        made = namespaces.Link(200.0).__enter__()
    except namespaces.CannotShapeError as error:
        pytest.skip(f"cannot make network namespaces here: {error}")
    yield made
    made.__exit__(None, None, None)


@pytest.fixture
def world(link, tmp_path):
    made = World(tmp_path, 2, 1, link=link)
    # Once all are there, so that the training is cut and not its start.
    made.run(train, steps=3, every=1, wait=1)
    yield made
    made.close()


def faults(world, link, tmp_path, *, cut, seconds=100, **arguments):
    """How both sides end if the link is cut once they train, for so many seconds, or for good."""
    world.ask(faulty, [0, 1], folder=str(tmp_path), every=2, wait=1, pause=0.1, **arguments)
    ends = time.monotonic() + seconds
    while not all((tmp_path / f"begun-{rank}").exists() for rank in (0, 1)):
        assert time.monotonic() < ends, "no rank trains"
        time.sleep(0.01)
    link.cut()
    restoring = threading.Timer(cut or 0.0, link.restore)
    if cut is not None:
        restoring.start()
    try:
        return world.answers([0, 1], seconds)
    finally:
        restoring.cancel()


def test_a_short_cut_is_sat_out(link, world, tmp_path):
    found = faults(world, link, tmp_path, cut=1.5, steps=20, timeout=60)
    assert [result["ended"] for result in found.values()] == ["through"] * 2
    assert [result["failed"] for result in found.values()] == [0, 0]
    assert torch.equal(found[0]["weights"], found[1]["weights"])


def test_a_longer_cut_counts_for_neither_side_and_both_go_on(link, world, tmp_path):
    found = faults(world, link, tmp_path, cut=9.5, steps=20, timeout=8, on_failure="continue")
    assert [result["ended"] for result in found.values()] == ["through"] * 2
    assert all(result["failed"] >= 1 for result in found.values())
    assert torch.equal(found[0]["weights"], found[1]["weights"])


def test_a_link_that_stays_cut_stops_both_sides(link, world, tmp_path):
    found = faults(world, link, tmp_path, cut=None, steps=40, timeout=4)
    assert "rank 1 lost" in found[0]["ended"]
    assert "the node that hosts the store" in found[1]["ended"]
    for result in found.values():
        assert result["finite"]
        assert torch.equal(result["saved"], result["weights"])
