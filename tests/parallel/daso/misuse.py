"""What ranks do in tests of what must not happen, or be refused; see ``worlds``."""

import gc
import os
import threading
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from gradweave.errors import GradweaveError, LostPeerError
from gradweave.optim import Eva, EvaF, EvaS
from gradweave.parallel.daso import DASO, api
from parallel.daso.clock import die_as, without_a_clock
from parallel.daso.training import loss_of, make_batch, make_model, make_optimizer, weights_of

TIMEOUT = 20


def said_by(call):
    try:
        call()
    except GradweaveError as error:
        return str(error)
    return None


def step(model, opt, number):
    loss_of(model, dist.get_rank(), number).backward()
    opt.step()
    opt.zero_grad()


def differing():
    """One rank, or one node, asks for something else; what each rank is told, and whether anything has changed."""
    rank, found = dist.get_rank(), {}
    common = {"mode": "delta", "every": 3, "wait": 1, "payload": "float32", "warm_up": 0, "on_failure": "raise"}
    others = {
        "mode": {"mode": "paper", "wait": None}, "payload": {"payload": "float16"}, "warm_up": {"warm_up": 2},
        "every": {"every": 4}, "wait": {"wait": 2}, "on_failure": {"on_failure": "continue"},
        "average_gradients": {"average_gradients": False}, "timeout=-1": {"timeout": -1},
    }  # fmt: skip
    for name, other in others.items():
        model = make_model()
        torch.manual_seed(rank)
        nn.init.normal_(model[0].weight)
        before, opt = weights_of(model), make_optimizer(model.parameters())
        options = {**common, "timeout": TIMEOUT, **(other if rank >= 2 else {})}
        said = said_by(lambda m=model, o=opt, given=options: DASO(m, o, **given))
        found[name] = said, torch.equal(before, weights_of(model))
    for name, kind, lr in (("lr", "sgd", 0.2), ("optimizer", "adamw", 0.1), ("LBFGS", "lbfgs", 0.1)):
        model = make_model()
        own = rank == 3
        opt = make_optimizer(model.parameters(), kind if own else "sgd", lr if own else 0.1)
        if kind == "lbfgs" and own:
            opt = torch.optim.LBFGS(model.parameters())
        found[name] = said_by(lambda m=model, o=opt: DASO(m, o, timeout=TIMEOUT)), True
    model = make_model()
    params = list(model.parameters())
    opt = make_optimizer(params if rank < 2 else params[::-1])
    found["order of parameters"] = said_by(lambda: DASO(model, opt, timeout=TIMEOUT)), True
    shape = (2, 2) if rank < 2 else (1, 4)
    mesh = mock.Mock(mesh_dim_names=("node", "local"), mesh=torch.arange(4).view(shape))
    model = make_model()
    said = said_by(lambda: DASO(model, make_optimizer(model.parameters()), mesh, timeout=TIMEOUT))
    found["mesh"] = said, True
    return found


def vectors(*, name, group, steps=10):
    """An Eva under DASO: what is said, or weights behind each step and at the end."""
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
        step(model, opt, number)
        seen.append(weights_of(model))
    daso.finish()
    return None, torch.stack(seen), weights_of(model)


def uneven_vectors():
    """One rank of a node runs out of batches under an optimizer that averages in each step."""
    model = make_model()
    opt = Eva(model, lr=0.05)
    daso = DASO(model, opt, every=3, wait=1, timeout=4, checkpoint_dir=f"uneven-{dist.get_rank()}")
    before, said = weights_of(model), None
    try:
        for number in range(2 if dist.get_rank() in (1, 3) else 5):
            step(model, opt, number)
            before = weights_of(model)
        daso.finish()
    except GradweaveError as error:
        said = str(error)
    daso.detach()
    return said, torch.equal(before, weights_of(model))


def unfreezes(*, layers):
    """Each rank begins to train a layer of its own choice: when it hears of others, and whether weights had moved."""
    model = make_model()
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    opt = make_optimizer(model.parameters())
    daso = DASO(model, opt, every=2, wait=1, timeout=TIMEOUT, checkpoint_dir=f"unfreezes-{dist.get_rank()}")
    said = None
    for number in range(6):
        if number == 3:
            (model[0] if layers[dist.get_rank()] == 0 else model[2].bias).requires_grad_(True)
        before = weights_of(model)
        said = said_by(lambda now=number: step(model, opt, now))
        if said is not None:
            break
    moved = said is not None and not torch.equal(before, weights_of(model))
    if said is None:
        daso.finish()
    daso.detach()
    return said, number, moved


class Noisy(torch.optim.SGD):
    """An optimizer with noise of its own on each rank."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        generator = torch.Generator().manual_seed(dist.get_rank())
        for p in self.param_groups[0]["params"]:
            p.add_(torch.randn(p.shape, generator=generator), alpha=1e-6)


def noisy(*, average_gradients):
    model = make_model()
    opt = Noisy(model.parameters(), lr=0.1)
    daso = DASO(model, opt, every=2, wait=1, timeout=TIMEOUT, average_gradients=average_gradients)
    said, number = None, 0
    try:
        for number in range(6):
            loss_of(model, dist.get_rank(), number).backward()
            if not average_gradients:
                for p in model.parameters():
                    p.grad.zero_()
            opt.step()
            opt.zero_grad()
    except GradweaveError as error:
        said = str(error)
    daso.detach()
    return said, number


def averaged_twice(*, how):
    """Something else that averages too: what is said, at which step, and whether weights had moved by then."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
    local = mesh.get_group("local")
    model = make_model()
    opt = make_optimizer(model.parameters())
    options = {"every": 3, "wait": 1, "timeout": TIMEOUT}
    before, number, daso = weights_of(model), -1, None
    try:
        if how == "DDP first":
            daso = DASO(DistributedDataParallel(model), opt, mesh, **options)
        if how == "DDP of a part first":
            model[2] = DistributedDataParallel(model[2], process_group=local)
            daso = DASO(model, opt, mesh, **options)
        daso = daso or DASO(model, opt, mesh, **options)
        before, run = weights_of(model), model
        if how == "evaluated under DDP":
            with torch.no_grad():
                DistributedDataParallel(model)(make_batch(0, 0)[0])
        if how == "DDP that is not used":
            unused = DistributedDataParallel(model)
            assert unused.module is model
        if how in ("DDP behind", "local DDP behind", "compiled under DDP", "part of a module under DDP"):
            run = DistributedDataParallel(
                torch.compile(model, backend="aot_eager") if "compiled" in how
                else _Around(model) if "part" in how else model,
                process_group=local if "local" in how else None,
            )  # fmt: skip
        if how.startswith("Accelerate"):
            from accelerate import Accelerator

            with mock.patch.dict(os.environ, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}):
                run, opt = Accelerator(cpu=True).prepare(model, opt)
        if how == "FSDP behind":
            from torch.distributed.fsdp import fully_shard

            fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
        for number in range(4):
            step(run, opt, number)
    except GradweaveError as error:
        said = str(error)
    else:
        said = None
    moved = how != "FSDP behind" and not torch.equal(before, weights_of(model))
    if daso is not None:
        daso.detach()
    return said, number, moved


class _Around(nn.Module):
    """As a Lightning module: it goes past the forward of the model that was given."""

    def __init__(self, model):
        super().__init__()
        self.net = model

    def forward(self, x):
        return self.net[2](self.net[1](self.net[0](x)))


ATTACHING = [
    "Groups", "lend", "declaration", "Mates", "Layout", "Agreement", "Connections", "Rhythm",
    "DeltaRule", "Setup", "Exchange", "replicas_of_node", "Averaging", "BackwardWatch", "Lookout",
    "claim_model", "claim_optimizer", "Changes", "chunks",
]  # fmt: skip


def failed_attach():
    """Each part of attaching fails in turn, on all ranks: what is left behind of each."""
    gc.collect()
    model = make_model()
    opt = make_optimizer(model.parameters())
    DASO(model, opt, timeout=TIMEOUT).detach()
    before, left = _resources(model, opt), {}
    for name in ATTACHING:
        with ExitStack() as patched:

            def fails(*_args, _name=name, **_options):
                raise ZeroDivisionError(_name)

            patched.enter_context(mock.patch.object(api, name, fails))
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
        step(model, opt, number)
    daso.finish()
    return left, weights_of(model)


def _resources(model, opt):
    """Hooks, notes, groups, open files and threads."""
    gc.collect()
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    hooks += [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()]
    hooks += [len(opt._optimizer_step_pre_hooks), len(opt._optimizer_step_post_hooks)]
    groups = len(dist.distributed_c10d._world.pg_names)
    note = getattr(opt, "_gradweave_daso", None)
    return hooks, note, groups, _open()


def _open():
    """How many files and threads this process has."""
    return tuple(len(list(Path("/proc/self", what).iterdir())) for what in ("fd", "task"))


def used_often(*, times, how):
    """Open files and threads before and after DASO was used so often."""
    counts = []
    for number in range(times):
        model = make_model()
        opt = make_optimizer(model.parameters())
        daso = DASO(model, opt, every=1, wait=1, timeout=TIMEOUT)
        for at in range(3):
            step(model, opt, at)
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


def _settle():
    """A transfer may still be under way behind detach(); what it holds goes as it ends."""
    ends = time.monotonic() + 20
    while time.monotonic() < ends and any(thread.name.startswith("gradweave") for thread in threading.enumerate()):
        time.sleep(0.05)
    gc.collect()


def paper_in_turn(*, steps, die=None, **options):
    """One rank per node by the published rules, at B = 1 and W = 1: two exchanges are under way at a time."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("node", "local"))
    model = make_model()
    opt = make_optimizer(model.parameters())
    options = {"timeout": 5, "checkpoint_dir": f"paper-{dist.get_rank()}", **options}
    with without_a_clock() if die else nullcontext(lambda _: None) as knows:
        daso = DASO(model, opt, mesh, mode="paper", warm_up=0, every=1, **options)
        knows(daso)
    for epoch in range(7):
        step(model, opt, epoch)
        daso.epoch_end(1.0)
    assert (daso.stats()["every"], daso.stats()["wait"]) == (1, 1)
    stalls, said = 0, None
    try:
        for number in range(steps):
            if die is not None and die[0] == dist.get_rank() and die[1] == number:
                die_as(dist.get_rank())
            began = time.monotonic()
            step(model, opt, number)
            stalls += time.monotonic() - began > options["timeout"] - 1
        daso.finish()
    except LostPeerError as error:
        said = str(error)
    return said, stalls, daso.stats()["failed_exchanges"], weights_of(model)


def one_node():
    """Four ranks of one node, with running statistics: everything is the same at the end, and steps are counted."""
    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("node", "local"))
    model = make_model("norm")
    opt = make_optimizer(model.parameters())
    daso = DASO(model, opt, mesh, timeout=TIMEOUT)
    for number in range(5):
        step(model, opt, number)
    daso.finish()
    return torch.cat([b.float().reshape(-1) for b in model.buffers()]), daso.steps


def steps_counted(*, counts):
    """Standing by is no training."""
    model = make_model()
    opt = make_optimizer(model.parameters())
    with DASO(model, opt, every=4, wait=2, timeout=TIMEOUT) as daso:
        for number in range(counts[dist.get_rank()]):
            step(model, opt, number)
    return daso.steps, daso.stats()["steps"]


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
