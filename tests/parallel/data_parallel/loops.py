"""Steps of training loops of all kinds; each returns what is worth comparing."""

import torch
import torch.distributed as dist

from parallel.data_parallel.models import batch, loss_of


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


def keeps_gradients(model, wrapped, opt, kind, step):
    """As methods that compare gradients of several losses do."""
    kept = []
    for part in range(2):
        backward(wrapped, kind, 2 * step + part)
        kept.append([p.grad for p in model.parameters()])
        opt.zero_grad()
    for p, *both in zip(model.parameters(), *kept, strict=True):
        p.grad = sum(both)
    finish(opt)


def replaces_gradient_data(model, wrapped, opt, kind, step):
    backward(wrapped, kind, step)
    for p in model.parameters():
        p.grad.data = p.grad.data * 0.5
    finish(opt)


def adds_without_sync(model, wrapped, opt, kind, step):
    """Add a gradient that is the same on all ranks, and needs no averaging."""
    backward(wrapped, kind, step)
    with wrapped.no_sync():
        sum(p.square().sum() for p in model.parameters()).backward()
    finish(opt)


def reads_after_step(model, wrapped, opt, kind, step):
    backward(wrapped, kind, step)
    opt.step()
    seen = torch.cat([p.grad.flatten() for p in model.parameters()])
    opt.zero_grad()
    return seen


def never_clears(model, wrapped, opt, kind, step):
    backward(wrapped, kind, step)
    opt.step()


def adds_a_layer(model, wrapped, opt, kind, step):
    """A layer is put into another one's place, between steps."""
    if step == 2:
        torch.manual_seed(7)
        model[2] = torch.nn.Linear(12, 12)
        opt.add_param_group({"params": list(model[2].parameters())})
    backward(wrapped, kind, step)
    finish(opt)


def two_heads(model, wrapped, opt, kind, step):
    """A backward for each part of what the model returns."""
    x, _ = batch(kind, step, dist.get_rank())
    out = wrapped(x)
    out[:, :2].square().sum().backward(retain_graph=True)
    out[:, 2:].sum().backward()
    finish(opt)


LOOPS = (
    keeps_gradients, replaces_gradient_data, adds_without_sync, reads_after_step, never_clears, adds_a_layer, two_heads,
    reads_gradients, evaluates, two_backwards, two_forwards_first, clears_in_place, thaws, throws_away, scales,
)  # fmt: skip
