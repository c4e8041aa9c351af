"""What ranks do in tests of data parallel; see ``daso.worlds``. Each returns what its test looks at."""

import copy
import io
import os
import signal
import time
import warnings
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from gradweave._runtime.deferred.pending_parameter import PendingParameter
from gradweave.errors import GradweaveError
from gradweave.parallel.data_parallel import DataParallel
from gradweave.parallel.data_parallel.replicas import BufferBroadcast
from parallel.data_parallel.loops import BODIES, backward, finish
from parallel.data_parallel.models import batch, loss_of, make, optimizer_of, weights


def train(
    *, kind="mlp", optimizer="sgd", steps=6, way="ours", clip=None, accumulate=1, schedule=False, look=False, **options
):
    """A plain loop; weights after every step."""
    model = make(kind)
    opt = optimizer_of(model.parameters(), optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
    if way == "ddp":
        wrapped = DistributedDataParallel(model, find_unused_parameters=kind == "tied")
    else:
        wrapped = wrap(model, opt, way, **options)
    rank, seen, losses, norms = dist.get_rank(), [], [], []
    for step in range(steps):
        for part in range(accumulate):
            if part < accumulate - 1:
                with wrapped.no_sync():
                    loss_of(wrapped, kind, 10 * step + part, rank).backward()
            else:
                loss = loss_of(wrapped, kind, 10 * step + part, rank)
                loss.backward()
        if clip:
            norms.append(float(nn.utils.clip_grad_norm_(wrapped.parameters(), clip)))
        opt.step()
        opt.zero_grad()
        if schedule:
            scheduler.step()
        losses.append(float(loss.detach()))
        if look:
            seen.append(weights(model))
    state = [s[key].clone() for s in opt.state.values() for key in s if key != "step"]
    result = {
        "seen": seen, "end": weights(model), "losses": losses, "norms": norms, "state": state,
        "buffers": [b.clone() for b in model.buffers()], "names": list(wrapped.state_dict()),
        "parameter_names": [n for n, _ in wrapped.named_parameters()],
        "explained": wrapped.explain() if way == "ours" else "", "k": wrapped.k if way == "ours" else None,
    }  # fmt: skip
    if way == "ours":
        wrapped.detach()
    dist.barrier()
    return result


class ByHand(nn.Module):
    """Averages after every backward, parameter by parameter, the way DistributedDataParallel does it."""

    def __init__(self, model, dtype=None):
        super().__init__()
        self.module, self.dtype, self.syncs = model, dtype, True

    def forward(self, x):
        made = self.module(x)
        made.register_hook(lambda _: Variable._execution_engine.queue_callback(self.average))
        return made

    def average(self):
        for p in self.module.parameters():
            if p.grad is not None and self.syncs:
                message = torch.empty_like(p.grad, dtype=self.dtype or p.dtype)
                torch.mul(p.grad, 1 / dist.get_world_size(), out=message)
                dist.all_reduce(message)
                p.grad.copy_(message)

    @contextmanager
    def no_sync(self):
        self.syncs = False
        yield
        self.syncs = True


def wrap(model, opt, way, **options):
    if way == "by hand":
        return ByHand(model)
    return DistributedDataParallel(model) if way == "ddp" else DataParallel(model, opt, **options)


def leave(wrapped):
    if isinstance(wrapped, DataParallel):
        wrapped.detach()
    dist.barrier()


def loop(*, way, body, kind="mlp", optimizer="adamw", steps=5, **options):
    """A loop whose steps are one of the functions below; weights, and what they return."""
    model = make(kind)
    opt = optimizer_of(model.parameters(), optimizer)
    wrapped = wrap(model, opt, way, **options)
    notes = [BODIES[body](model, wrapped, opt, kind, step) for step in range(steps)]
    end = weights(model)
    leave(wrapped)
    return {"end": end, "notes": [note for note in notes if note is not None]}


def low_precision(*, way, **options):
    """Gradients travel as bfloat16."""
    model = make("mlp")
    opt = optimizer_of(model.parameters(), "sgd")
    if way == "by hand":
        wrapped = ByHand(model, torch.bfloat16)
    else:
        wrapped = DataParallel(model, opt, reduce_dtype=torch.bfloat16, **options)
    for step in range(4):
        backward(wrapped, "mlp", step)
        finish(opt)
    end = weights(model)
    leave(wrapped)
    return end


def autocast(*, way, **options):
    model = make("mlp")
    opt = optimizer_of(model.parameters(), "sgd")
    wrapped = wrap(model, opt, way, **options)
    for step in range(4):
        x, y = batch("mlp", step, dist.get_rank())
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(wrapped(x).float(), y)
        loss.backward()
        finish(opt)
    end = weights(model)
    leave(wrapped)
    return end


class Choosing(nn.Module):
    """Each rank leaves another layer out, and both leave out a third."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))
        self.last = nn.Linear(12, 5)

    def forward(self, x):
        for number, part in enumerate(self.parts):
            if number not in (dist.get_rank(), 2):
                x = torch.tanh(part(x))
        return self.last(x)


def leaves_out(*, way, **options):
    torch.manual_seed(0)
    model = Choosing()
    opt = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    if way == "ddp":
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    else:
        wrapped = DataParallel(model, opt, **options)
    for step in range(4):
        backward(wrapped, "mlp", step)
        finish(opt)
    end = weights(model)
    leave(wrapped)
    return end


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.first, self.last = nn.Linear(12, 12), nn.Linear(12, 5)
        self.middle = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12))

    def forward(self, x):
        return self.last(checkpoint(self.middle, self.first(x), use_reentrant=self.reentrant))


def checkpoints(*, way, reentrant, **options):
    torch.manual_seed(0)
    model = Checkpointed(reentrant)
    opt = optimizer_of(model.parameters(), "adamw")
    wrapped = wrap(model, opt, way, **options)
    for step in range(4):
        backward(wrapped, "mlp", step)
        finish(opt)
    end = weights(model)
    leave(wrapped)
    return end


def orders(*, k):
    """In which order gradients come, and which weights are pending when the last layer is reached."""
    model = make("mlp")
    opt = optimizer_of(model.parameters(), "sgd")
    linears = [module for module in model if isinstance(module, nn.Linear)]
    came, pending = [], []
    for number, module in enumerate(linears):
        module.weight.register_post_accumulate_grad_hook(lambda _, number=number: came.append(number))
        module.register_forward_pre_hook(
            lambda *_: pending.append([isinstance(m.weight, PendingParameter) for m in linears])
        )
    wrapped = DataParallel(model, opt, policy="reverse_first_k", k=k, bucket_bytes=1)
    for step in range(4):
        came.clear()
        pending.clear()
        backward(wrapped, "mlp", step)
        finish(opt)
    leave(wrapped)
    return {"came": came, "pending": pending}


def resumes(*, at, steps, **options):
    """A checkpoint taken in mid-run by its model's own names, and a plain model that goes on from it."""
    model = make("conv")
    opt = optimizer_of(model.parameters(), "adamw")
    wrapped = DataParallel(model, opt, **options)
    for step in range(at):
        backward(wrapped, "conv", step)
        finish(opt)
    saved = copy.deepcopy((wrapped.state_dict(), opt.state_dict()))
    for step in range(at, steps):
        backward(wrapped, "conv", step)
        finish(opt)
    end = weights(model)
    leave(wrapped)
    fresh = make("conv")
    for p in fresh.parameters():
        p.data.add_(1.0)
    other = optimizer_of(fresh.parameters(), "adamw")
    again = DataParallel(fresh, other, **options)
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    for step in range(at, steps):
        backward(again, "conv", step)
        finish(other)
    result = weights(fresh)
    leave(again)
    return {"end": end, "resumed": result}


def holds(*, byte_budget):
    """The most that held-back gradients have kept alive, and the weights at the end."""
    model = make("mlp")
    opt = optimizer_of(model.parameters(), "sgd")
    wrapped = DataParallel(model, opt, policy="reverse_first_k", k="all", byte_budget=byte_budget)
    for step in range(4):
        backward(wrapped, "mlp", step)
        finish(opt)
    end, held = weights(model), wrapped.most_bytes_held
    leave(wrapped)
    return {"end": end, "held": held}


def differs():
    """Models that are not the same on all ranks."""
    model = nn.Linear(3, 2 + dist.get_rank())
    try:
        DataParallel(model, optimizer_of(model.parameters(), "sgd"))
    except GradweaveError as error:
        return str(error)
    return ""


def auto(*, steps=40):
    """A link that costs next to nothing."""
    model = make("mlp")
    opt = optimizer_of(model.parameters(), "sgd")
    wrapped = DataParallel(model, opt)
    for step in range(steps):
        backward(wrapped, "mlp", step % 5)
        finish(opt)
    result = {"explained": wrapped.explain(), "end": weights(model)}
    leave(wrapped)
    return result


def fails(*, when):
    """A backward that fails before anything was sent, or behind the first message; then another one."""
    model = make("mlp")
    opt = optimizer_of(model.parameters(), "sgd")
    wrapped = DataParallel(model, opt, policy="no_barrier", bucket_bytes=1)
    for step in range(2):
        backward(wrapped, "mlp", step)
        finish(opt)
    x, y = batch("mlp", 2, dist.get_rank())
    loss = F.cross_entropy(wrapped(x), y)

    def fail(_):
        raise ValueError("as the test wants it")

    hook = model[8 if when == "early" else 0].weight.register_hook(fail)
    said = []
    try:
        loss.backward()
    except ValueError as error:
        said.append(str(error))
    hook.remove()
    opt.zero_grad()
    try:
        backward(wrapped, "mlp", 2)
        finish(opt)
    except GradweaveError as error:
        said.append(str(error))
    wrapped.detach()
    dist.barrier()
    return {"said": said}


def dies(*, policy, limit):
    """The second rank dies in its third step; what the first hears of it, and after how long."""
    model = make("mlp")
    opt = optimizer_of(model.parameters(), "sgd")
    options = {"k": 2} if policy == "reverse_first_k" else {}
    wrapped = DataParallel(model, opt, policy=policy, timeout=limit, **options)
    began = time.monotonic()
    try:
        for step in range(8):
            began = time.monotonic()
            if step == 3 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            backward(wrapped, "mlp", step)
            finish(opt)
        wrapped.flush()
    except GradweaveError as error:
        spent, again = time.monotonic() - began, ""
        try:
            wrapped.state_dict()
        except GradweaveError as second:
            again = type(second).__name__
        with warnings.catch_warnings(record=True):
            plain = wrapped.detach()
        whole = all(torch.isfinite(p).all() and type(p) is nn.Parameter for p in plain.parameters())
        torch.save(plain.state_dict(), "saved.pt")
        return {"said": str(error), "kind": type(error).__name__, "seconds": spent, "again": again, "whole": whole}
    return {"said": "", "kind": "", "seconds": 0.0}


def runs_out(*, limit):
    """The second rank has fewer batches than the first."""
    model = make("mlp")
    opt = optimizer_of(model.parameters(), "sgd")
    wrapped = DataParallel(model, opt, policy="no_barrier", timeout=limit)
    try:
        for step in range(4 + 2 * (1 - dist.get_rank())):
            backward(wrapped, "mlp", step)
            finish(opt)
        wrapped.flush()
    except GradweaveError as error:
        return str(error)
    return ""


def shares_buffers():
    model = nn.Module()
    model.register_buffer("value", torch.full((3,), float(dist.get_rank())))
    model.register_buffer("count", torch.tensor(7 + dist.get_rank()))
    BufferBroadcast(model, dist.group.WORLD).run()
    return {name: value.clone() for name, value in model.named_buffers()}


def options_differ():
    model = make("mlp")
    try:
        DataParallel(model, optimizer_of(model.parameters(), "sgd"), bucket_bytes=100 + dist.get_rank())
    except GradweaveError as error:
        return str(error)
    return ""


def nests():
    model = make("conv")
    parent = nn.ModuleDict({"inner": DataParallel(model, optimizer_of(model.parameters(), "sgd"))})
    saved = {name: value + 1 for name, value in parent.state_dict().items()}
    parent.load_state_dict(saved)
    right = all(torch.equal(value, saved[f"inner.{name}"]) for name, value in model.state_dict().items())
    parent["inner"].detach()
    return right and "inner.0.weight" in saved


def copies():
    model = make("mlp")
    opt = optimizer_of(model.parameters(), "sgd")
    wrapped = DataParallel(model, opt, policy="no_barrier")
    for step in range(3):
        backward(wrapped, "mlp", step)
        finish(opt)
    buffer = io.BytesIO()
    torch.save(wrapped, buffer)
    buffer.seek(0)
    made = [copy.deepcopy(wrapped), torch.load(buffer, weights_only=False)]
    averaged = torch.optim.swa_utils.AveragedModel(wrapped)
    averaged.update_parameters(wrapped)
    same = all(torch.equal(weights(one), weights(model)) for one in (*made, averaged.module))
    loss_of(made[0], "mlp", 0, 0).backward()
    trains = made[0][0].weight.grad is not None
    leave(wrapped)
    return type(made[1]).__name__, same, trains


def in_parts():
    """Two groups of two ranks, each with a wrapper of its own; then a group of all."""
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    rank = dist.get_rank()
    model = make("conv")
    opt = optimizer_of(model.parameters(), "sgd")
    wrapped = DataParallel(model, opt, policy="no_barrier", process_group=groups[rank // 2])
    dist.new_group()
    for step in range(4):
        backward(wrapped, "conv", step)
        finish(opt)
    end = weights(model)
    wrapped.detach()
    dist.barrier()
    return end
