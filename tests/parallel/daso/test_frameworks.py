"""Inside Lightning's Trainer and Fabric: what a plain loop gives, or an error before a weight changes that says why."""

import pytest
import torch

from parallel.daso.worlds import World


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    world = World(tmp_path_factory.mktemp("ranks"), 2, 1, scenarios="parallel.daso.frameworks")
    yield world
    world.close()


PLACES = [
    ("constructor", "the model"),
    ("configure_optimizers", "the model"),
    ("configure_optimizers", "the module"),
    ("on_fit_start", "the model"),
    ("on_train_start", "the module"),
]


def equal(answers, expected):
    for answer in answers.values():
        assert isinstance(answer, torch.Tensor), answer
        assert torch.equal(answer, expected[0])


def refused(answers):
    for said in answers.values():
        assert isinstance(said, str)
        assert not said.startswith("too late")
        assert "DistributedDataParallel" in said
        assert "averages gradients already, over ranks [0, 1]" in said
        assert "Lightning: no ddp strategy" in said


@pytest.fixture(scope="module")
def expected(ranks):
    return ranks.run("by_hand")


@pytest.mark.parametrize(("where", "of"), PLACES)
def test_a_trainer_of_one_device_gives_what_a_loop_gives(ranks, expected, where, of):
    equal(ranks.run("in_lightning", where=where, of=of), expected)


@pytest.mark.parametrize("options", [{"alone": False}, {"manual": True}], ids=["under torchrun", "manual optimization"])
def test_a_trainer_may_know_of_other_ranks_and_the_module_may_step_by_itself(ranks, expected, options):
    equal(ranks.run("in_lightning", where="on_fit_start", **options), expected)


def test_batches_that_a_trainer_accumulates(ranks):
    equal(ranks.run("in_lightning", where="on_fit_start", accumulated=2), ranks.run("by_hand", accumulated=2))


@pytest.mark.parametrize(("where", "of"), PLACES)
def test_a_trainer_that_averages_over_all_ranks_is_refused_in_its_first_step(ranks, where, of):
    refused(ranks.run("in_lightning", where=where, of=of, strategy="ddp"))


def test_a_trainer_that_averages_over_the_one_node_is_refused_unless_daso_leaves_averaging_to_it(ranks):
    refused(ranks.run("in_lightning", where="on_fit_start", strategy="ddp", nodes=1))
    left = ranks.run("in_lightning", where="on_fit_start", strategy="ddp", nodes=1, average_gradients=False)
    by_hand = ranks.run("by_hand", nodes=1)
    for answer in left.values():
        assert torch.equal(answer, left[0])
        assert torch.allclose(answer, by_hand[0], atol=1e-6)


@pytest.mark.parametrize("order", ["DASO first", "DASO of the model", "DASO of what setup() gives"])
def test_fabric_without_and_with_ddp(ranks, expected, order):
    equal(ranks.run("in_fabric", order=order), expected)
    refused(ranks.run("in_fabric", order=order, strategy="ddp"))
