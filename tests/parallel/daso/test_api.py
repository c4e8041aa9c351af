"""The public class: attaching, the options of a run, and letting go."""

import gc
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from gradweave.compare.data import digits
from gradweave.parallel.daso import DASO, api, exchange, training_loop
from parallel.daso.training import (
    TIMEOUT,
    loss_of,
    make_model,
    make_optimizer,
    one_step,
    same_everywhere,
    setting,
    train,
    train_ddp,
    weights_of,
)


@pytest.mark.parametrize(
    "options",
    [
        {"every": 3, "wait": 2},
        {},
        {"pace": "lr", "schedule": True},
        {"pace": "plateau"},
        {"every": 2, "wait": 1, "payload": "float16"},
        {"every": 1000, "wait": 1000},
        {"warm_up": 3, "cool_down": 3, "total": 15, "every": 4, "wait": 4},
        {"optimizer": "adamw", "lr": 0.01, "every": 3, "wait": 1},
        {"kind": "norm", "every": 2, "wait": 2},
    ],
)
def test_afterwards_all_ranks_have_the_same_weights(two_by_two, options):
    found = two_by_two.run(train, steps=15, **options)
    assert same_everywhere(found)
    assert torch.isfinite(found[0]["end"]).all()
    assert len({tuple(result["rhythm"]) for result in found.values()}) == 1


def test_same_seed_same_weights_run_by_run(two_by_two):
    runs = [two_by_two.run(train, steps=10, every=2, wait=2) for _ in range(2)]
    assert all(torch.equal(runs[0][rank]["end"], runs[1][rank]["end"]) for rank in runs[0])


def inner_ddp(*, steps, **options):
    """DDP inside the node, as a mesh of the user's own says."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
    model, opt = setting()
    wrapped = DistributedDataParallel(model, process_group=mesh.get_group("local"))
    daso = DASO(wrapped, opt, mesh, timeout=TIMEOUT, **options)
    seen = []
    for step in range(steps):
        one_step(wrapped, opt, step)
        seen.append(weights_of(model))
    daso.finish()
    return {"seen": torch.stack(seen), "end": weights_of(model)}


def test_with_data_parallel_inside_the_node(two_by_two):
    own = two_by_two.run(train, steps=10, every=3, wait=1, payload="float32")
    found = two_by_two.run(inner_ddp, steps=10, every=3, wait=1, payload="float32")
    assert same_everywhere(found)
    for rank in found:
        assert torch.allclose(found[rank]["seen"], own[rank]["seen"], rtol=1e-5, atol=1e-6)
    together = two_by_two.run(inner_ddp, steps=6, warm_up=6, payload="float32")
    stock = two_by_two.run(train_ddp, steps=6)[0]["seen"]
    assert torch.allclose(together[0]["seen"], stock, rtol=1e-5, atol=1e-6)


def partial_group():
    """A group of the user's own that not all ranks are in."""
    dist.new_group([0, 2])
    return train(steps=5, every=2, wait=1)["end"]


def test_groups_of_the_users_own(two_by_two):
    assert same_everywhere(two_by_two.run(partial_group), None)
    assert same_everywhere(two_by_two.run(partial_group), None)


_DIGITS = {"delta": {"every": 3, "wait": 2}, "paper": {"warm_up": 2, "cool_down": 2, "total": 12}}


def learn_digits(*, way, epochs=12, batch=25):
    """Real data: handwritten digits, of which each rank has its part; the share known of those kept back."""
    x, y = digits()
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(64, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 10))
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    daso = None if way == "ddp" else DASO(model, opt, mode=way, timeout=TIMEOUT, **_DIGITS[way])
    wrapped = DistributedDataParallel(model) if way == "ddp" else model
    for epoch in range(epochs):
        order = torch.randperm(1400, generator=torch.Generator().manual_seed(epoch)).view(-1, size, batch)[:, rank]
        for index in order:
            F.cross_entropy(wrapped(x[index]), y[index]).backward()
            opt.step()
            opt.zero_grad()
        if daso is not None:
            daso.epoch_end(1.0)
    if daso is not None:
        daso.finish()
    model.eval()
    return float((model(x[1400:]).argmax(1) == y[1400:]).float().mean())


def test_real_digits_are_learnt_as_well_as_by_data_parallel(two_by_two):
    stock = two_by_two.run(learn_digits, way="ddp")[0]
    assert stock > 0.9
    for way in ("delta", "paper"):
        found = two_by_two.run(learn_digits, way=way)
        assert found[0] > stock - 0.02
        assert abs(found[0] - found[3]) < 0.02


def test_one_process_trains_as_without(caplog):
    weights = []
    for attached in (False, True):
        model = make_model()
        opt = make_optimizer(model.parameters())
        daso = DASO(model, opt) if attached else None
        for step in range(5):
            loss_of(model, 0, step).backward()
            opt.step()
            opt.zero_grad()
        if daso is not None:
            assert daso.steps == 5
            assert daso.stats()["exchanges"] == 0
            daso.load_state_dict(daso.state_dict())
            daso.finish()
            daso.finish()
        weights.append(weights_of(model))
    assert torch.equal(*weights)


def test_letting_go_leaves_nothing_behind():
    model = make_model()
    opt = make_optimizer(model.parameters())
    with pytest.raises(ZeroDivisionError), DASO(model, opt) as daso:
        raise ZeroDivisionError
    loss_of(model, 0, 0).backward()
    opt.step()
    assert daso.steps == 0
    DASO(model, opt).detach()


ATTACHING = [
    (api, "Groups"), (api, "lend_ranks"), (api, "declaration"), (api, "NodeGroup"), (api, "Connections"),
    (api, "Changes"), (api, "Agreement"), (api, "Rhythm"), (api, "DeltaRule"), (api, "Setup"), (api, "Exchange"),
    (exchange, "Stats"), (api, "GradientAveraging"), (api, "replicas_of_node"), (api, "TrainingLoop"),
    (training_loop, "BackwardWatch"), (api, "Ending"), (api, "Lookout"), (api, "claim_model"), (api, "claim_optimizer"),
    (api, "Layout"), (api, "chunks"),
]  # fmt: skip


def _open():
    """How many files and threads this process has."""
    return tuple(len(list(Path("/proc/self", what).iterdir())) for what in ("fd", "task"))


def _resources(model, opt):
    """Hooks, notes, groups, open files and threads."""
    gc.collect()
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    hooks += [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()]
    hooks += [len(opt._optimizer_step_pre_hooks), len(opt._optimizer_step_post_hooks)]
    groups = len(dist.distributed_c10d._world.pg_names)
    note = getattr(opt, "_gradweave_daso", None)
    return hooks, note, groups, _open()


def failed_attach():
    """Each part of attaching fails in turn, on all ranks; return what each leaves."""
    gc.collect()
    model = make_model()
    opt = make_optimizer(model.parameters())
    DASO(model, opt, timeout=TIMEOUT).detach()
    before, left = _resources(model, opt), {}
    for module, name in ATTACHING:
        with ExitStack() as patched:

            def fails(*_args, _name=name, **_options):
                raise ZeroDivisionError(_name)

            patched.enter_context(mock.patch.object(module, name, fails))
            try:
                DASO(model, opt, timeout=TIMEOUT)
                left[name] = "did not fail"
                continue
            except ZeroDivisionError:
                pass
        dist.barrier()
        after = _resources(model, opt)
        if after != before:
            left[name] = f"{before} {after}"
    daso = DASO(model, opt, timeout=TIMEOUT, every=2, wait=1)
    for number in range(3):
        one_step(model, opt, number)
    daso.finish()
    return left, weights_of(model)


def test_a_failed_attach_leaves_nothing_behind(two_by_two):
    found = two_by_two.run(failed_attach)
    assert {rank: left for rank, (left, _) in found.items()} == {rank: {} for rank in found}
    assert all(torch.equal(found[0][1], weights) for _, weights in found.values())


def _settle():
    """A transfer may still be under way after detach(); what it holds goes as it ends."""
    ends = time.monotonic() + 20
    while time.monotonic() < ends and any(thread.name.startswith("gradweave") for thread in threading.enumerate()):
        time.sleep(0.05)
    gc.collect()


def used_often(*, times, how):
    """Open files and threads before and after DASO was used so often."""
    counts = []
    for number in range(times):
        model = make_model()
        opt = make_optimizer(model.parameters())
        daso = DASO(model, opt, every=1, wait=1, timeout=TIMEOUT)
        for at in range(3):
            one_step(model, opt, at)
        if how == "finish":
            daso.finish()
        elif how == "detach":
            daso.detach()
        del daso, model, opt
        gc.collect()
        dist.barrier()
        if number in (0, times - 1):
            _settle()
            counts.append(_open())
    return counts


@pytest.mark.parametrize("how", ["finish", "detach", "neither"])
def test_many_uses_leave_no_files_and_threads_behind(two_by_two, how):
    for first, last in two_by_two.run(used_often, times=5, how=how).values():
        assert last[0] <= first[0]
        assert last[1] <= first[1]
