"""Training with deferred updates, compared with stock order."""

from torch import nn

from fusion.loops import adamw, assert_same, batches, loss_of, make_net
from gradweave._runtime.ab_trial import RULES
from gradweave.fusion import fuse

LONG = 1 + 2 * RULES.rounds * RULES.steps + 4


def pending(model):
    return [name for name, p in model.named_parameters() if type(p) is not nn.Parameter]


def train(mode, odd=lambda *_: None, steps=8, model=None, make=adamw):
    model = make_net() if model is None else model
    optimizer = make(model)
    fusion = fuse(model, optimizer, mode) if mode else None
    seen = []
    for i, (x, y) in enumerate(batches(steps)):
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
        seen.append(odd(i, model, optimizer, x))
    if fusion:
        fusion.detach()
    return (model, optimizer), seen


def same(odd, mode="forward", **more):
    (expected, wanted), (trained, got) = train(None, odd, **more), train(mode, odd, **more)
    assert got == wanted
    assert_same(trained, expected)
