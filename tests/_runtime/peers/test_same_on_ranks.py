"""Facts that must be the same on all ranks: where one differs or refuses, all raise, and none waits."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradweave._runtime.peers.same_on_ranks import (
    describe_buffers,
    describe_optimizer,
    describe_parameters,
    same_on_ranks,
)
from worlds import World


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    world = World(tmp_path_factory.mktemp("three"), 3, 1)
    yield world
    world.close()


def compares(*, facts, refuses=None):
    """Declare the facts of the rank; return what that raises, and how many bytes each rank gave to all others."""
    sent, stock = [], dist.all_gather_object

    def gather(into, value, **options):
        sent.append(len(repr(value)))
        return stock(into, value, **options)

    dist.all_gather_object = gather
    try:
        with same_on_ranks(None, technique="DASO") as own:
            own |= facts[dist.get_rank()]
            if refuses == dist.get_rank():
                raise KeyError("no such thing")
    except Exception as error:
        return type(error).__name__, str(error), sent
    finally:
        dist.all_gather_object = stock
    return None, "", sent


def test_the_same_facts_are_no_error_and_travel_as_a_digest(three):
    facts = {f"parameter {number}": "of shape (1000, 1000)" for number in range(500)}
    for kind, _, sent in three.run(compares, facts=[facts] * 3).values():
        assert kind is None
        assert len(sent) == 1
        assert sent[0] < 100


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"a": "1", "b": "3"}, "b: is 3 on rank 2 and 2 on rank 0; give DASO the same on all ranks"),
        ({"a": "1"}, "b: is absent on rank 2 and 2 on rank 0"),
        ({"a": "1", "b": "2", "c": "3"}, "c: is 3 on rank 2 and absent on rank 0"),
        ({"b": "2", "a": "1"}, "a: comes where b does on rank 2"),
        ({"a": "1", "b": "x" * 999}, "b: is " + "x" * 120 + "... on rank 2"),
    ],
)
def test_a_fact_that_differs_is_named_on_all_ranks(three, other, said):
    facts = {"a": "1", "b": "2"}
    for kind, message, _ in three.run(compares, facts=[facts, facts, other]).values():
        assert kind == "UnsupportedError"
        assert message.startswith(said)


def test_what_one_rank_refuses_all_refuse_whatever_else_differs(three):
    found = three.run(compares, facts=[{"a": "1"}, {"a": "2"}, {}], refuses=1)
    assert found[1][:2] == ("KeyError", "'no such thing'")
    for rank in (0, 2):
        assert found[rank][:2] == ("GradweaveError", "DASO: rank 1 refuses, and so do all: 'no such thing'")


def test_without_another_rank_nothing_is_compared():
    with same_on_ranks(None, technique="DASO", alone=True) as facts:
        facts["a"] = "1"
    with pytest.raises(KeyError), same_on_ranks(None, technique="DASO", alone=True):
        raise KeyError


def test_a_model_is_described_by_shapes_types_use_and_ties():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2, affine=False))
    model[1].weight = model[0].weight
    model.append(nn.Linear(2, 1, bias=False).requires_grad_(False))
    facts = describe_parameters(model.named_parameters(remove_duplicate=False))
    assert facts == {
        "parameter 0.weight": "of shape (2, 2) and torch.float32",
        "parameter 1.weight": "the same as 0.weight",
        "parameter 3.weight": "of shape (1, 2) and torch.float32, frozen",
    }
    assert describe_buffers(model.named_buffers())["buffer 2.running_mean"] == "of shape (2,) and torch.float32"


def test_an_optimizer_that_was_loaded_is_described_as_one_that_was_made():
    weight = nn.Parameter(torch.zeros(2))
    made, loaded = (torch.optim.SGD([weight], lr=0.1, momentum=0.9) for _ in range(2))
    group = loaded.param_groups[0]
    for name in ("lr", "momentum"):
        group[name] = group.pop(name)
    assert list(describe_optimizer(made).items()) == list(describe_optimizer(loaded).items())
    assert next(iter(describe_optimizer(made).items())) == ("the optimizer", "torch.optim.sgd.SGD")
