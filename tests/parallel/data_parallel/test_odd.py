"""Odd loops give what DistributedDataParallel gives, bit for bit; ranks that diverge raise an error on both."""

import pytest
import torch
import torch.distributed as dist

from gradweave.errors import GradweaveError
from gradweave.parallel.data_parallel import DataParallel
from parallel.data_parallel.models import loss_of, optimizer_of
from parallel.data_parallel.odd import APART, STEPS, end_of, fails, program, small
from worlds import World

IN_ONE_GO = 20


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    world = World(tmp_path_factory.mktemp("ranks"), 2, 1)
    yield world
    world.close()


def loops(*, seeds):
    """Run each loop, also with DistributedDataParallel; return those that end otherwise."""
    wrong = []
    for seed in seeds:
        steps, options, optimizer, norms = program(seed)
        (ours, said), (theirs, they_said) = (end_of(steps, options, optimizer, norms, way) for way in ("ours", "ddp"))
        same = len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        if said != they_said or not same:
            wrong.append((seed, options, optimizer, norms, steps, said, they_said))
    return wrong


def check(ranks, seeds):
    for wrong in ranks.run(loops, seeds=seeds).values():
        assert wrong == []


@pytest.mark.parametrize("first", range(0, 40, IN_ONE_GO))
def test_odd_loops_give_what_ddp_gives(ranks, first):
    check(ranks, list(range(first, first + IN_ONE_GO)))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(40, 3000, IN_ONE_GO))
def test_thousands_of_odd_loops_give_what_ddp_gives(ranks, first):
    check(ranks, list(range(first, first + IN_ONE_GO)))


POLICIES = [{"policy": "in_order"}, {"policy": "no_barrier"}, {"policy": "auto"}, {"policy": "reverse_first_k", "k": 2}]


def apart(*, what, at, policy, norms):
    """Let one rank deviate in one step; return the step in which each raises, and the error."""
    model = small(norms)
    opt = optimizer_of(model.parameters(), "adamw")
    trained = DataParallel(model, opt, timeout=30, **policy)
    alone = dist.get_rank() == 1
    heard = None
    for step in range(STEPS):
        try:
            loss_of(trained, "mlp", step, dist.get_rank()).backward()
        except GradweaveError as error:
            heard = step, str(error)
            break
        odd = alone and step == at
        rate = opt.param_groups[0]["lr"]
        if odd and what == "fails in a step":
            fails(opt)
        elif not (odd and what == "leaves out a step"):
            if odd and what == "has another rate":
                opt.param_groups[0]["lr"] = 2 * rate
            opt.step()
        opt.zero_grad()
        if odd and what == "loads other weights":
            trained.load_state_dict({name: 2 * value for name, value in model.state_dict().items()})
        if odd and what == "changes a weight":
            with torch.no_grad():
                model[3].weight[0, 0] += 1e-3
    trained.detach()
    dist.barrier()
    return heard


@pytest.mark.parametrize("what", APART)
@pytest.mark.parametrize("policy", POLICIES, ids=lambda o: o["policy"])
@pytest.mark.parametrize(("at", "norms"), [(0, True), (1, False), (2, True)])
def test_ranks_that_part_hear_the_same_error_soon(ranks, what, policy, at, norms):
    answers = ranks.run(apart, what=what, at=at, policy=policy, norms=norms)
    assert answers[0] == answers[1]
    step, said = answers[0]
    assert at < step <= (2 if at == 0 else 4)
    if "step" in what:
        assert step <= at + 2
        assert "the number of steps taken is" in said
    else:
        assert "weights differ between ranks" in said
    if what == "has another rate":
        assert "lr of group 0 is 0.01 on rank 0 and 0.02 on rank 1" in said


def trains_others(*, layers, timeout):
    """Let each rank begin to train a layer, or none, after two steps; return the step and the error that it raises."""
    model = small(True)
    model.requires_grad_(False)
    model[-1].requires_grad_(True)
    opt = optimizer_of(model.parameters(), "sgd")
    trained = DataParallel(model, opt, policy="no_barrier", timeout=timeout)
    for step in range(5):
        if step == 2 and layers[dist.get_rank()] is not None:
            model[layers[dist.get_rank()]].requires_grad_(True)
        try:
            loss_of(trained, "mlp", step, dist.get_rank()).backward()
        except GradweaveError as error:
            trained.detach()
            return step, type(error).__name__, str(error)
        opt.step()
        opt.zero_grad()
    trained.detach()
    return None


def test_ranks_that_begin_to_train_other_layers_hear_so_at_once(ranks):
    assert list(ranks.run(trains_others, layers=[0, 0], timeout=60).values()) == [None, None]
    first, second = ranks.run(trains_others, layers=[0, 3], timeout=60).values()
    assert (first[0], first[1]) == (second[0], second[1]) == (2, "ReplicaError")
    assert "which parameters are trained has changed on rank 0, and not so on rank 1" in first[2]


def test_one_that_begins_to_train_more_by_itself_is_told_when_the_others_do_not_come(ranks):
    first, second = ranks.run(trains_others, layers=[0, None], timeout=2).values()
    assert first[:2] == (2, "ReplicaError")
    assert "has changed on rank 0, and not so on rank 1" in first[2]
    assert second[1] == "LostPeerError"
