"""What tests of several files run on every rank."""

import torch.distributed as dist
from torch import nn

from gradweave.errors import GradweaveError
from gradweave.parallel.pipeline import Pipeline
from parallel.pipeline.models import batch, loss_fn, make, stock_step


def raised(action):
    """Return what an action raises as text, or None."""
    try:
        action()
    except GradweaveError as error:
        return f"{type(error).__name__}: {error}"
    except RuntimeError as error:
        return f"RuntimeError: {error} {error.__cause__}"
    return None


def gradients(name, microbatches=4, steps=2, **options):
    """Train; return the plan, and the largest difference of gradients, buffers and losses from the whole model's."""
    options.setdefault("timeout", 20)
    pipe = Pipeline(make(name), loss_fn, microbatches=microbatches, **options)
    stock = make(name)
    worst = 0.0
    for step in range(steps):
        wanted = stock_step(stock, name, microbatches, seed=step)
        loss = pipe.step(*batch(name, seed=step))
        if pipe.has_last_stage:
            worst = max(worst, float((loss - wanted).abs()))
        else:
            assert loss is None
    grads = {n: p.grad for n, p in stock.named_parameters(remove_duplicate=False)}
    for n, p in pipe.module.named_parameters(remove_duplicate=False):
        assert (p.grad is None) == (grads[n] is None), n
        if p.grad is not None:
            worst = max(worst, float((p.grad - grads[n]).abs().max()))
    buffers = dict(stock.named_buffers())
    for n, b in pipe.module.named_buffers():
        worst = max(worst, float((b - buffers[n]).abs().max()))
    plan = pipe.plan
    held = pipe.most_bytes_held
    pipe.close()
    return {
        "worst": worst,
        "policy": plan.program.policy,
        "stages": plan.program.stages,
        "layers": [len(run) for run in plan.runs],
        "in_flight": plan.program.most_in_flight,
        "held": held,
        "names": list(pipe.state_dict()),
    }


def refused(name="gpt", different=None, **options):
    """Return what making a pipeline raises; rank 1 has what is ``different``."""
    options.setdefault("microbatches", 4)
    options.setdefault("timeout", 20)
    if different is not None and dist.get_rank() == 1:
        name = different.pop("name", name)
        options.update(different)
    return raised(lambda: Pipeline(make(name), loss_fn, **options))


def a_step(name, **options):
    """Return what a step of a model raises."""
    pipe = Pipeline(make(name), loss_fn, microbatches=4, timeout=20, **options)
    return raised(lambda: pipe.step(*batch(name)))


class Failing(nn.Module):
    """A layer whose third forward fails."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls > 2:
            raise ValueError("this layer has had enough")
        return self.linear(x)
