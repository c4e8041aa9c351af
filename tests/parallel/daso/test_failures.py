"""Ranks that are killed, stopped or slow: no weights may be torn, and no rank may wait for ever."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradweave.errors import LostPeerError
from gradweave.parallel.daso import DASO
from parallel.daso.faults import faulty
from parallel.daso.training import one_step, setting, weights_of
from worlds import World

TIMEOUT = 8
"""Long enough for a machine that does much else at the same time; only messages between nodes wait for it."""


@pytest.fixture
def world(tmp_path):
    made = []

    def make(nodes, places, **options):
        made.append(World(tmp_path, nodes, places, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def faults(world, survivors, tmp_path, **arguments):
    world.ask(faulty, range(world.size), folder=str(tmp_path), **{"clock": False, **arguments})
    return world.answers(survivors)


@pytest.mark.parametrize(
    "die",
    [
        pytest.param([1, 3, "before"], id="before a send"),
        pytest.param([1, 4, "within", 0.021], id="while something is under way"),
        pytest.param([1, 5, "within", 0.0], id="after a send"),
    ],
)
def test_without_the_lost_node_training_goes_on(world, tmp_path, die):
    found = faults(
        world(3, 1), [0, 2], tmp_path, steps=12, every=2, wait=1, timeout=TIMEOUT, die=die, on_failure="continue"
    )
    for result in found.values():
        assert result["ended"] == "through"
        assert result["finite"]
        assert result["failed"] >= 1
    assert torch.equal(found[0]["weights"], found[2]["weights"])


def test_a_lost_rank_stops_all_with_its_name_and_a_checkpoint(world, tmp_path):
    found = faults(world(2, 2), [0, 1], tmp_path, steps=40, every=2, wait=1, timeout=TIMEOUT, die=[3, 5, "before"])
    for result in found.values():
        assert "ranks 2, 3 lost" in result["ended"]
        assert result["ranks"] == (2, 3)
        assert f"at step {result['step']}" in result["ended"]
        assert result["finite"]
        assert torch.equal(result["saved"], result["weights"])
    assert torch.equal(found[0]["weights"], found[1]["weights"])


def test_a_rank_that_loses_its_mate_stops(world, tmp_path):
    found = faults(world(2, 2), [2], tmp_path, steps=40, every=2, wait=1, timeout=TIMEOUT, die=[3, 5, "before"])
    assert "a rank of this node is lost, of rank 3" in found[2]["ended"]
    assert torch.equal(found[2]["saved"], found[2]["weights"])


def test_a_node_lost_in_the_warm_up(world, tmp_path):
    found = faults(
        world(3, 1), [0, 2], tmp_path, steps=14, warm_up=8, every=2, wait=1, timeout=TIMEOUT, die=[1, 4, "before"],
        on_failure="continue",
    )  # fmt: skip
    assert {result["ended"] for result in found.values()} == {"through"}
    assert torch.equal(found[0]["weights"], found[2]["weights"])


def test_two_nodes_lost_one_after_the_other(world, tmp_path):
    arguments = {
        "steps": 30,
        "every": 2,
        "wait": 1,
        "timeout": TIMEOUT,
        "on_failure": "continue",
        "folder": str(tmp_path),
        "clock": False,
    }
    made = world(3, 1)
    made.ask(faulty, [0], **arguments)
    made.ask(faulty, [1], **arguments, die=[1, 4, "before"])
    made.ask(faulty, [2], **arguments, die=[2, 12, "before"])
    result = made.answers([0])[0]
    assert result["ended"] == "through"
    assert (result["failed"], result["finite"]) == (2, True)


def test_the_node_that_hosts_the_store_is_lost(world, tmp_path):
    found = faults(
        world(2, 1, tcp=True), [1], tmp_path, steps=40, every=2, wait=1, timeout=TIMEOUT, die=[0, 5, "before"],
        on_failure="continue", clock=True,
    )  # fmt: skip
    assert "the node that hosts the store is lost" in found[1]["ended"]
    assert torch.equal(found[1]["saved"], found[1]["weights"])


def test_a_straggler_is_waited_for(world, tmp_path):
    found = faults(
        world(2, 1), [0, 1], tmp_path, steps=10, every=2, wait=1, timeout=60, stop=[1, 4, 1.5], slow=[1, 0.03]
    )
    assert {result["ended"] for result in found.values()} == {"through"}
    assert torch.equal(found[0]["weights"], found[1]["weights"])
    assert [result["failed"] for result in found.values()] == [0, 0]


def test_a_rank_that_is_far_too_late_is_told_that_the_others_went_on(world, tmp_path):
    found = faults(
        world(3, 1),
        [0, 1, 2],
        tmp_path,
        steps=12,
        every=2,
        wait=1,
        timeout=5,
        late=[1, 4, [0, 2]],
        on_failure="continue",
    )
    assert [found[rank]["ended"] for rank in (0, 2)] == ["through"] * 2
    assert torch.equal(found[0]["weights"], found[2]["weights"])
    assert "was too late" in found[1]["ended"]
    assert torch.equal(found[1]["saved"], found[1]["weights"])


def test_a_node_lost_while_all_finish(world, tmp_path):
    arguments = {
        "steps": 6,
        "every": 50,
        "wait": 50,
        "timeout": TIMEOUT,
        "on_failure": "continue",
        "folder": str(tmp_path),
        "clock": False,
    }
    made = world(3, 1)
    made.ask(faulty, [0, 2], **arguments)
    made.ask(faulty, [1], **{**arguments, "steps": 7}, die=[1, 6, "before"])
    found = made.answers([0, 2])
    assert [result["ended"] for result in found.values()] == ["through"] * 2
    assert torch.equal(found[0]["weights"], found[2]["weights"])


def overflow():
    """What each node sends is finite; the sum is not, in 16 bits."""
    model = nn.Linear(2, 1, bias=False)
    opt = torch.optim.SGD(model.parameters(), lr=1.0)
    daso = DASO(model, opt, timeout=TIMEOUT, every=2, wait=1, payload="float16", checkpoint_dir="overflown")
    with torch.no_grad():
        model.weight.add_(50_000)
    try:
        for _ in range(4):
            model.weight.sum().backward()
            opt.step()
            opt.zero_grad()
    except LostPeerError as error:
        return str(error), bool(torch.isfinite(model.weight).all())
    finally:
        daso.detach()


def test_a_sum_that_overflows_is_merged_by_no_node(two_by_two):
    for said, finite in two_by_two.run(overflow).values():
        assert "payload='float16' is too small" in said
        assert finite


def not_finite():
    """One node's weights are spoilt: no other node may take them over."""
    model, opt = setting()
    attached = DASO(model, opt, timeout=TIMEOUT, every=2, wait=1, checkpoint_dir=f"spoilt-{dist.get_rank()}")
    before = None
    try:
        for step in range(8):
            if step == 3 and dist.get_rank() >= 2:
                with torch.no_grad():
                    model[0].weight[0, 0] = float("nan")
            before = weights_of(model)
            one_step(model, opt, step)
    except LostPeerError as error:
        return str(error), error.ranks, bool(torch.isfinite(before).all())
    finally:
        attached.detach()


def test_numbers_that_are_not_finite_stay_where_they_are(two_by_two):
    for said, ranks, finite in two_by_two.run(not_finite).values():
        assert "has weights that are not finite" in said
        assert ranks == (2, 3)
        assert isinstance(finite, bool)
