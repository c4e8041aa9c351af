"""The step of an optimizer without its hooks, and its hooks without a step."""

import torch

from gradweave._compat import optimizers


def make():
    p = torch.nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    return p, torch.optim.SGD([p], lr=0.5)


def test_the_own_step_runs_no_hooks():
    p, optimizer = make()
    calls = []
    optimizer.register_step_pre_hook(hook := lambda *_: calls.append("before"))
    optimizers.own_step(optimizer)(optimizer)
    assert p.tolist() == [0.5, 0.5]
    assert calls == []
    assert list(optimizers.step_pre_hooks(optimizer).values()) == [hook]
    with optimizers.without_step_hooks(optimizer):
        optimizer.step()
    assert calls == []
    optimizer.step()
    assert calls == ["before"]


def test_a_hook_is_put_first():
    _, optimizer = make()
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append("other"))
    handle = optimizer.register_step_post_hook(lambda *_: calls.append("ours"))
    optimizers.put_first_after_step(optimizer, handle.id)
    optimizer.step()
    assert calls == ["ours", "other"]


def test_a_step_that_was_taken_otherwise_is_told_to_schedulers_and_hooks(recwarn):
    p, optimizer = make()
    calls = []
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    optimizers.mark_stepped(optimizer)
    scheduler.step()
    assert calls == ["after"]
    assert p.tolist() == [1, 1]
    assert not recwarn.list
