"""Averages of gradients, and optimizers that average statistics of their own."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from gradweave.errors import GradweaveError
from gradweave.optim import Eva, EvaF, EvaS
from gradweave.parallel.daso import DASO
from parallel.daso.training import (
    TIMEOUT,
    loss_of,
    make_batch,
    make_model,
    one_step,
    same_everywhere,
    setting,
    train,
    train_ddp,
    weights_of,
)


def test_the_warm_up_is_data_parallel_for_any_optimizer(two_by_two):
    stock = two_by_two.run(train_ddp, steps=8, optimizer="adamw", lr=0.01)[0]["seen"]
    found = two_by_two.run(train, steps=12, warm_up=8, every=2, wait=1, optimizer="adamw", lr=0.01)
    for result in found.values():
        assert torch.allclose(result["seen"][:8], stock, rtol=1e-5, atol=1e-6)
    assert not torch.equal(found[0]["seen"][9], found[2]["seen"][9])
    assert same_everywhere(found)


def sees_averages():
    """Gradients after backward() are the node's mean; those inside no_sync() are not."""
    model, opt = setting()
    daso = DASO(model, opt, timeout=TIMEOUT)
    with daso.no_sync():
        loss_of(model, dist.get_rank(), 0).backward()
    own = [p.grad.clone() for p in model.parameters()]
    opt.zero_grad()
    loss_of(model, dist.get_rank(), 0).backward()
    mean = [p.grad.clone() for p in model.parameters()]
    opt.step()
    daso.finish()
    return torch.cat([g.reshape(-1) for g in own]), torch.cat([g.reshape(-1) for g in mean])


def test_gradients_are_averaged_before_backward_returns(two_by_two):
    found = two_by_two.run(sees_averages)
    for node in range(2):
        own = [found[2 * node + place][0] for place in range(2)]
        for place in range(2):
            assert torch.equal(found[2 * node + place][1], (own[0] + own[1]) / 2)


def conditional(*, steps):
    """Ranks that use different parts of a model; a part that no rank uses has no gradient."""
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(6, 3) for name in ("a", "b", "c")})
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    daso = DASO(model, opt, timeout=TIMEOUT, every=2, wait=1)
    for step in range(steps):
        x, y = make_batch(dist.get_rank(), step)
        F.cross_entropy(model["ab"[dist.get_rank() % 2]](x), y).backward()
        gradients = [p.grad is None for p in model.parameters()]
        opt.step()
        opt.zero_grad()
    daso.finish()
    return gradients, torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def test_ranks_may_use_different_parts(two_by_two):
    found = two_by_two.run(conditional, steps=7)
    for gradients, _ in found.values():
        assert gradients == [False, False, False, False, True, True]
    assert same_everywhere(found, 1)


def vectors(*, name, group, steps=10):
    """Train with an Eva under DASO; return the error, or weights after each step and at the end."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
    model = make_model()
    given = {"local": {"process_group": mesh.get_group("local")}, "world": {"process_group": dist.group.WORLD},
             "none": {"process_group": None}, "default": {}}[group]  # fmt: skip
    opt = {"Eva": Eva, "EvaF": EvaF, "EvaS": EvaS}[name](model, lr=0.05, **given)
    before = weights_of(model)
    try:
        daso = DASO(model, opt, mesh, every=3, wait=1, warm_up=2, payload="float32", timeout=TIMEOUT)
    except GradweaveError as error:
        return str(error), torch.equal(before, weights_of(model)), None
    seen = []
    for number in range(steps):
        one_step(model, opt, number)
        seen.append(weights_of(model))
    daso.finish()
    return None, torch.stack(seen), weights_of(model)


@pytest.mark.parametrize(
    ("name", "group"), [("Eva", "default"), ("EvaF", "default"), ("EvaS", "default"), ("Eva", "local")]
)
def test_ranks_of_a_node_stay_alike_with_an_optimizer_that_has_statistics_of_its_own(two_by_two, name, group):
    found = two_by_two.run(vectors, name=name, group=group)
    assert all(said is None for said, _, _ in found.values())
    for node in (0, 2):
        assert torch.equal(found[node][1], found[node + 1][1])
    assert torch.allclose(found[0][1][1], found[2][1][1], atol=1e-6), "while nodes are together, they are the same"
    assert not torch.equal(found[0][1][6], found[2][1][6])
    assert all(torch.equal(found[0][2], end) for _, _, end in found.values())


@pytest.mark.parametrize("group", ["world", "none"])
def test_another_group_of_the_optimizers_own_is_refused(two_by_two, group):
    for said, unchanged, _ in two_by_two.run(vectors, name="Eva", group=group).values():
        assert "is not the group that DASO averages gradients over" in said
        assert unchanged


def uneven_vectors():
    """One rank of a node runs out of batches under an optimizer that averages in each step."""
    model = make_model()
    opt = Eva(model, lr=0.05)
    daso = DASO(model, opt, every=3, wait=1, timeout=4, checkpoint_dir=f"uneven-{dist.get_rank()}")
    before, said = weights_of(model), None
    try:
        for number in range(2 if dist.get_rank() in (1, 3) else 5):
            one_step(model, opt, number)
            before = weights_of(model)
        daso.finish()
    except GradweaveError as error:
        said = str(error)
    daso.detach()
    return said, torch.equal(before, weights_of(model))


def test_ranks_that_run_out_under_an_optimizer_that_averages_are_told_so(two_by_two):
    for said, unchanged in two_by_two.run(uneven_vectors).values():
        assert "run out of batches" in said
        assert unchanged


def parts_with_vectors(*, steps):
    """Ranks of a node that use different parts of a model, under an optimizer that averages over them."""
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(6, 3) for name in ("a", "b")})
    opt = Eva(model, lr=0.05)
    daso = DASO(model, opt, timeout=5, every=2, wait=1, checkpoint_dir=f"parts-{dist.get_rank()}")
    said = None
    try:
        for number in range(steps):
            x, y = make_batch(dist.get_rank(), number)
            F.cross_entropy(model["ab"[dist.get_rank() % 2]](x), y).backward()
            opt.step()
            opt.zero_grad()
    except (GradweaveError, RuntimeError) as error:
        said = f"{type(error).__name__}: {error}"
    daso.detach()
    return said, torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def test_parts_that_not_all_ranks_use_under_an_optimizer_that_averages(two_by_two):
    found = two_by_two.run(parts_with_vectors, steps=4)
    for node in (0, 2):
        alike = torch.equal(found[node][1], found[node + 1][1])
        assert (alike and found[node][0] is None) or "Error" in found[node][0], found
