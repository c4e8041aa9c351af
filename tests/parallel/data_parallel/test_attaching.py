"""An attach that fails or is undone leaves no trace; ranks that differ are refused on all ranks."""

import gc
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradweave.errors import GradweaveError, UnsupportedError
from gradweave.parallel.data_parallel import DataParallel
from parallel.data_parallel.loops import backward, finish
from parallel.data_parallel.models import make, optimizer_of, weights
from worlds import World


def _open():
    return tuple(len(list(Path(f"/proc/self/{what}").iterdir())) for what in ("fd", "task"))


def uses(*, policy, times=6):
    """Return the numbers of open files and threads after each of several uses."""
    counts = []
    gc.disable()  # what is left for the collector would be freed at some time, or never
    try:
        for _ in range(times):
            model = make("mlp")
            opt = optimizer_of(model.parameters(), "sgd")
            wrapped = DataParallel(model, opt, policy=policy)
            for step in range(3):
                backward(wrapped, "mlp", step)
                finish(opt)
            wrapped.detach()
            dist.barrier()
            counts.append(_open())
    finally:
        gc.enable()
    return counts


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    world = World(tmp_path_factory.mktemp("ranks"), 2, 1)
    yield world
    world.close()


@pytest.mark.parametrize("policy", ["in_order", "no_barrier", "reverse_first_k", "auto"])
def test_detach_ends_what_it_had_open(ranks, policy):
    for counts in ranks.run(uses, policy=policy).values():
        assert counts[-1] == counts[1]


def _traces(model, opt):
    """Return everything that attaching may leave on a model and its optimizer."""
    found = []
    for module in model.modules():
        found += [f"{name}: {len(value)}" for name, value in vars(module).items() if name.endswith("hooks") and value]
    for name, p in model.named_parameters():
        found += [f"{name}: {type(p).__name__}, {len(p._backward_hooks or ())} hooks, {sorted(vars(p))}"]
        found += [f"{name}: a gradient"] if p.grad is not None else []
    found += [f"{name}: {len(value)}" for name, value in vars(opt).items() if name.endswith("hooks")]
    found += [name for name, value in vars(opt).items() if "gradweave" in name and value is not None]
    found += [f"{len(opt.state)} states", f"{len(dist.distributed_c10d._world.pg_names)} groups"]
    return found


class Failing:
    """Context in which the n-th call of any function that attaching may need fails."""

    PLACES = (
        (nn.Module, "register_forward_pre_hook"), (nn.Module, "register_load_state_dict_post_hook"),
        (torch.optim.Optimizer, "register_step_pre_hook"), (torch.optim.Optimizer, "register_step_post_hook"),
        (torch.Tensor, "register_hook"), (dist, "broadcast"), (dist, "get_world_size"), (torch, "zeros"),
    )  # fmt: skip

    GROUPS = ((dist, "new_group"), (nn.Module, "register_load_state_dict_post_hook"))

    def __init__(self, at, places):
        self.at, self.calls, self.places = at, 0, places
        self.stock = [getattr(*place) for place in places]

    def __enter__(self):
        for (owner, name), stock in zip(self.places, self.stock, strict=True):
            setattr(owner, name, self._counted(stock))
        return self

    def _counted(self, stock):
        def counted(*args, **kwargs):
            self.calls += 1
            if self.calls == self.at:
                raise MemoryError("as the test wants it")
            return stock(*args, **kwargs)

        return counted

    def __exit__(self, *_):
        for (owner, name), stock in zip(self.places, self.stock, strict=True):
            setattr(owner, name, stock)


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 4), nn.BatchNorm1d(4), nn.Linear(4, 5))


def fails_at_every_step(*, own_groups):
    """Attach with a failure at the first call, at the second, and so on; return the traces, then train."""
    model = small()
    opt = optimizer_of(model.parameters(), "adamw")
    group, places = (None, Failing.GROUPS) if own_groups else (dist.group.WORLD, Failing.PLACES)
    before, start, left, at = _traces(model, opt), weights(model), [], 0
    while True:
        at += 1
        try:
            with Failing(at, places):
                wrapped = DataParallel(model, opt, policy="no_barrier", process_group=group)
            break
        except MemoryError:
            if _traces(model, opt) != before or not torch.equal(weights(model), start):
                left.append((at, [one for one in _traces(model, opt) if one not in before]))
    for step in range(3):
        backward(wrapped, "mlp", step)
        finish(opt)
    wrapped.detach()
    trained = small()
    other = optimizer_of(trained.parameters(), "adamw")
    plain = nn.parallel.DistributedDataParallel(trained)
    for step in range(3):
        backward(plain, "mlp", step)
        finish(other)
    return {"tried": at - 1, "left": left, "same": torch.equal(weights(model), weights(trained))}


@pytest.mark.parametrize(("own_groups", "least"), [(True, 3), (False, 20)])
def test_an_attach_that_fails_at_any_step_leaves_nothing_behind(ranks, own_groups, least):
    for answer in ranks.run(fails_at_every_step, own_groups=own_groups).values():
        assert answer["tried"] >= least
        assert answer["left"] == []
        assert answer["same"]


def refuses(*, what):
    """Wrap something else on one rank; return the error and what is left."""
    rank = dist.get_rank()
    model = make("mlp")
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if what == "learning rate" and rank == 1:
        opt.param_groups[0]["lr"] = torch.tensor(0.2)
    if what == "class" and rank == 1:
        opt = torch.optim.AdamW(model.parameters(), lr=0.1)
    if what == "groups" and rank == 1:
        opt = torch.optim.SGD(list(model.parameters())[1:], lr=0.1, momentum=0.9)
    if what == "frozen" and rank == 1:
        model[0].requires_grad_(False)
    if what == "one refuses" and rank == 1:
        opt = torch.optim.LBFGS(model.parameters())
    options = {"policy": "auto"}
    if what == "an option that one refuses" and rank == 1:
        options = {"policy": "fast"}
    try:
        DataParallel(model, opt, **options)
    except GradweaveError as error:
        return str(error), _traces(model, opt)[-1], model[0].weight._backward_hooks is None
    return "", "", False


@pytest.mark.parametrize(
    ("what", "on_first", "on_second"),
    [
        ("learning rate", "lr of group 0: is 0.2", "on rank 1 and 0.1 on rank 0; give DataParallel"),
        ("class", "torch.optim.sgd.SGD", "torch.optim.adamw.AdamW"),
        ("groups", "the number of parameters in group 0: is 9 on rank 1 and 10 on rank 0", "is 9 on rank 1"),
        ("frozen", "frozen on rank 1 and of shape", "frozen on rank 1 and of shape"),
        ("one refuses", "rank 1 refuses, and so do all: LBFGS", "LBFGS: it cannot be updated in parts"),
        ("an option that one refuses", "rank 1 refuses, and so do all: policy='fast'", "policy='fast': use one of"),
    ],
)
def test_what_differs_between_ranks_is_refused_on_all(ranks, what, on_first, on_second):
    for said, answer in zip((on_first, on_second), ranks.run(refuses, what=what).values(), strict=True):
        assert said in answer[0]
        assert answer[1:] == ("1 groups", True)


class Coupled(torch.optim.SGD):
    """Optimizer that divides all gradients by their common norm."""

    def step(self, closure=None):
        norm = torch.stack([p.grad.norm() for g in self.param_groups for p in g["params"] if p.grad is not None]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad / norm, alpha=-group["lr"])


def test_what_is_refused_names_what_to_use_instead():
    model = nn.Linear(3, 3)
    with pytest.raises(UnsupportedError, match="; use DistributedDataParallel") as caught:
        DataParallel(model, Coupled(model.parameters(), lr=0.1))
    assert "fuse" not in str(caught.value)


ENDS_WITHOUT_A_WORD = """
import sys, torch, torch.distributed as dist
from torch import nn
from gradweave.parallel.data_parallel import DataParallel
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=int(sys.argv[1]), world_size=2)
model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
trained = DataParallel(model, optimizer, policy="no_barrier")
for _ in range(3):
    trained(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
if sys.argv[3] == "destroyed":
    dist.destroy_process_group()
    trained.detach()
"""


def run_to_the_end(store, end):
    """Run the program on two ranks; return their exit statuses and what they wrote to stderr."""
    command = [sys.executable, "-c", ENDS_WITHOUT_A_WORD]
    ranks = [subprocess.Popen([*command, str(rank), str(store), end], stderr=subprocess.PIPE) for rank in range(2)]
    try:
        errors = [rank.communicate(timeout=80)[1].decode() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [rank.returncode for rank in ranks], errors


@pytest.mark.parametrize("end", ["as it is", "destroyed"])
def test_a_program_that_ends_without_detach_ends_well(tmp_path, end):
    # torch aborts now and then if a program leaves the default group to the interpreter's end, with plain DDP too. An
    # abort that repeats itself is ours.
    for attempt in range(3 if end == "as it is" else 1):
        codes, errors = run_to_the_end(tmp_path / f"store{attempt}", end)
        if codes == [0, 0]:
            break
    assert codes == [0, 0], errors
    assert not any("terminate called" in error for error in errors)
