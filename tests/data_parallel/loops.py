"""Training loops of all kinds, by name; each takes one step, and returns what is worth comparing."""

import torch
import torch.distributed as dist

from data_parallel.models import batch, loss_of


def backward(wrapped, kind, step):
    loss_of(wrapped, kind, step, dist.get_rank()).backward()


def finish(opt):
    opt.step()
    opt.zero_grad()


def reads_gradients(model, wrapped, opt, kind, step):
    backward(wrapped, kind, step)
    seen = torch.cat([p.grad.flatten() for p in model.parameters()])
    for p in model.parameters():
        p.grad.mul_(0.5)
    finish(opt)
    return seen


def evaluates(model, wrapped, opt, kind, step):
    backward(wrapped, kind, step)
    finish(opt)
    wrapped.eval()
    with torch.no_grad():
        seen = wrapped(batch(kind, 99, 0)[0])
    wrapped.train()
    return seen


def two_backwards(model, wrapped, opt, kind, step):
    backward(wrapped, kind, 2 * step)
    backward(wrapped, kind, 2 * step + 1)
    finish(opt)


def two_forwards_first(model, wrapped, opt, kind, step):
    losses = [loss_of(wrapped, kind, 2 * step + part, dist.get_rank()) for part in range(2)]
    for loss in losses:
        loss.backward()
    finish(opt)


def clears_in_place(model, wrapped, opt, kind, step):
    backward(wrapped, kind, step)
    opt.step()
    opt.zero_grad(set_to_none=False)


def thaws(model, wrapped, opt, kind, step):
    model[0].requires_grad_(step not in (1, 2, 3))
    backward(wrapped, kind, step)
    finish(opt)


def throws_away(model, wrapped, opt, kind, step):
    backward(wrapped, kind, 50 + step)
    opt.zero_grad()
    backward(wrapped, kind, step)
    finish(opt)


def scales(model, wrapped, opt, kind, step):
    scaler = opt.__dict__.setdefault("scaler_of_the_test", torch.amp.GradScaler("cpu", init_scale=8.0))
    factor = float("inf") if step == 2 else 1.0
    scaler.scale(factor * loss_of(wrapped, kind, step, dist.get_rank())).backward()
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()
    return torch.tensor(scaler.get_scale())


BODIES = {
    f.__name__: f
    for f in (
        reads_gradients, evaluates, two_backwards, two_forwards_first, clears_in_place, thaws, throws_away, scales,
    )
}  # fmt: skip
