"""Odd training loops, drawn at random."""

import random
from contextlib import nullcontext, suppress

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradweave.parallel.data_parallel import DataParallel
from parallel.data_parallel.models import loss_of, optimizer_of, weights
from parallel.data_parallel.ways import ByHand

STEPS = 10
GRADIENTS = ("one", "one", "one", "two backwards", "accumulates", "two forwards first", "thrown away", "in closure")
BEFORE = ("", "", "", "clips", "clips by value", "reads a norm", "halves", "looks for a sharper place")
UPDATE = ("steps", "steps", "steps", "steps", "leaves out", "fails first", "steps twice")
AFTER = (
    "", "", "evaluates", "evaluates in training", "changes the rate", "freezes", "thaws", "clamps", "saves", "loads",
    "forgets its state", "loads its state", "looks", "reads a gradient",
)  # fmt: skip
CLEARS = ("clears", "clears", "clears", "clears in place", "does not clear")
APART = ("leaves out a step", "fails in a step", "loads other weights", "has another rate", "changes a weight")
"""Deviations of one rank from the other."""


def program(seed):
    """A loop: for each step what is done, and what it is made of."""
    draw = random.Random(seed)
    steps = [[draw.choice(part) for part in (GRADIENTS, BEFORE, UPDATE, AFTER, CLEARS)] for _ in range(STEPS)]
    policy = draw.choice(
        [{"policy": "in_order"}, {"policy": "no_barrier"}, {"policy": "auto"}, {"policy": "reverse_first_k", "k": 2},
         {"policy": "reverse_first_k", "k": "all"}]
    )  # fmt: skip
    options = {**policy, "bucket_bytes": draw.choice([1, 700, 2**22])}
    return steps, options, draw.choice(["sgd", "adamw", "fused"]), draw.random() < 0.5


def small(norms):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(12, 8), nn.BatchNorm1d(8) if norms else nn.Identity(), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 5)
    )


def fails(opt):
    """A step that fails, by a check of the user's."""

    def check(*_):
        raise ValueError("as the test wants it")

    hook = opt.register_step_pre_hook(check)
    with suppress(ValueError):
        opt.step()
    hook.remove()


class Loop:
    """Loop that takes the steps of a program."""

    def __init__(self, model, trained, opt):
        self.model, self.trained, self.opt = model, trained, opt
        self.seen, self.batch = [], 0
        self.saved = {name: value.clone() for name, value in model.state_dict().items()}
        self.saved_state = None

    def backward(self):
        self.batch += 1
        loss = loss_of(self.trained, "mlp", self.batch, dist.get_rank())
        loss.backward()
        return loss

    def sync(self, syncs):
        return nullcontext() if syncs else self.trained.no_sync()

    def take(self, gradients, before, update, after, clears):
        if gradients == "in closure" and update in ("steps", "fails first"):
            self.opt.step(self.closure)
        else:
            self.gradients(gradients)
            self.before(before)
            self.update(update)
        self.after(after)
        if clears != "does not clear":
            self.opt.zero_grad(set_to_none=clears == "clears")

    def closure(self):
        self.opt.zero_grad()
        return self.backward()

    def gradients(self, how):
        if how == "two backwards":
            self.backward()
        elif how == "accumulates":
            with self.sync(False):
                self.backward()
        elif how == "two forwards first":
            losses = [loss_of(self.trained, "mlp", 100 + self.batch + n, dist.get_rank()) for n in range(2)]
            for loss in losses:
                loss.backward()
            return
        elif how == "thrown away":
            self.backward()
            self.opt.zero_grad()
        self.backward()

    def before(self, what):
        params = [p for p in self.model.parameters() if p.grad is not None]
        if what == "clips":
            self.seen.append(nn.utils.clip_grad_norm_(self.model.parameters(), 0.5))
        elif what == "clips by value":
            nn.utils.clip_grad_value_(self.model.parameters(), 0.05)
        elif what == "reads a norm":
            self.seen.append(torch.stack([p.grad.norm() for p in params]).norm())
        elif what == "halves":
            for p in params:
                p.grad.mul_(0.5)
        elif what == "looks for a sharper place":
            kept = [p.detach().clone() for p in self.model.parameters()]
            with torch.no_grad():
                for p in self.model.parameters():
                    p.add_(0.01 * (1 + dist.get_rank()))
            self.opt.zero_grad()
            self.backward()
            with torch.no_grad():
                for p, value in zip(self.model.parameters(), kept, strict=True):
                    p.copy_(value)

    def update(self, how):
        if how == "leaves out":
            return
        if how == "fails first":
            fails(self.opt)
        self.opt.step()
        if how == "steps twice":
            self.opt.step()

    def after(self, what):
        if what.startswith("evaluates"):
            self.trained.train("training" in what)
            with torch.no_grad():
                loss = loss_of(self.trained, "mlp", 7, 0)
            if dist.get_rank() == 0:  # others have their own buffers in evaluation
                self.seen.append(loss)
            self.trained.train()
        elif what == "changes the rate":
            self.opt.param_groups[0]["lr"] *= 0.7
        elif what in ("freezes", "thaws"):
            self.model[3].requires_grad_(what == "thaws")
        elif what == "clamps":
            with torch.no_grad():
                for p in self.model.parameters():
                    p.clamp_(-0.2, 0.2)
        elif what == "saves":
            self.saved = {name: value.clone() for name, value in self.model.state_dict().items()}
            self.saved_state = self.opt.state_dict()
        elif what == "loads":
            self.model.load_state_dict(self.saved)
        elif what == "forgets its state":
            self.opt.state.clear()
        elif what == "loads its state" and self.saved_state is not None:
            self.opt.load_state_dict(self.saved_state)
        elif what == "looks":
            self.seen.append(weights(self.model).norm())
        elif what == "reads a gradient" and self.model[4].weight.grad is not None:
            self.seen.append(self.model[4].weight.grad.clone())


def end_of(steps, options, optimizer, norms, way):
    model = small(norms)
    opt = optimizer_of(model.parameters(), optimizer)
    if way == "ours":
        trained = DataParallel(model, opt, timeout=30, **options)
    elif any(odd in step for step in steps for odd in ("freezes", "two forwards first")):  # which DDP gets wrong
        trained = _Averaged(model)
    else:
        trained = DistributedDataParallel(model)
    loop, said = Loop(model, trained, opt), None
    try:
        for step in steps:
            loop.take(*step)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    end = [*loop.seen, weights(model)]
    if dist.get_rank() == 0:  # others have their own from a forward to the next one in training
        end += [b.clone() for b in model.buffers()]
    if way == "ours":
        trained.detach()
    dist.barrier()
    return end, said


class _Averaged(ByHand):
    """By hand, with the buffers of the first rank, for parameters that are frozen on the way."""

    def forward(self, x):
        if self.training and torch.is_grad_enabled():
            for buffer in self.module.buffers():
                dist.broadcast(buffer, 0)
        if torch.is_grad_enabled():
            return super().forward(x)
        return self.module(x)
