"""The training that DASO's tests run, in every process and in the reference."""

import inspect

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from gradweave.errors import GradweaveError
from gradweave.parallel.daso import DASO
from gradweave.parallel.daso.options import Options

TIMEOUT = 20
"""Seconds that ranks wait for each other, unless a test says otherwise."""


def make_model(kind="mlp"):
    torch.manual_seed(7)
    if kind == "norm":
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def make_optimizer(params, name="sgd", lr=0.1):
    if name == "sgd":
        return torch.optim.SGD(params, lr=lr, momentum=0.9, weight_decay=1e-3)
    return torch.optim.AdamW(params, lr=lr)


def make_batch(rank, step):
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(5, 6, generator=generator), torch.randint(0, 3, (5,), generator=generator)


def loss_of(model, rank, step):
    x, y = make_batch(rank, step)
    return F.cross_entropy(model(x), y)


def weights_of(model):
    return torch.cat([p.detach().reshape(-1).float() for p in model.parameters()])


def options(**changes):
    """DASO's options, with its defaults."""
    defaults = {name: p.default for name, p in inspect.signature(DASO).parameters.items()}
    fields = Options.__dataclass_fields__
    return Options(**{**{name: defaults[name] for name in fields}, **changes})


def same_everywhere(results, key="end"):
    first = results[0][key] if key is not None else results[0]
    return all(torch.equal(first, result[key] if key is not None else result) for result in results.values())


def setting(kind="mlp", optimizer="sgd", lr=0.1):
    model = make_model(kind)
    return model, make_optimizer(model.parameters(), optimizer, lr)


def one_step(model, opt, step, rank=None):
    loss = loss_of(model, dist.get_rank() if rank is None else rank, step)
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.detach()


def train(*, steps, kind="mlp", optimizer="sgd", lr=0.1, finish=True, schedule=False, **options):
    """Train in a plain loop; return weights after every step, the end, and what DASO says of itself."""
    model, opt = setting(kind, optimizer, lr)
    daso = DASO(model, opt, **{"timeout": TIMEOUT, **options})
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 4, 0.5)
    seen = []
    for step in range(steps):
        loss = one_step(model, opt, step)
        daso.observe(loss)
        if schedule:
            scheduler.step()
        seen.append(weights_of(model))
    stats = daso.stats()
    if finish:
        daso.finish()
    else:
        dist.barrier()
        daso.detach()
    buffers = [b.clone() for b in model.buffers()]
    state = [s["momentum_buffer"].clone() for s in opt.state.values() if "momentum_buffer" in s]
    return {
        "seen": torch.stack(seen) if seen else None, "end": weights_of(model), "stats": stats, "state": state,
        "rhythm": daso.rhythm, "buffers": buffers, "steps": daso.steps,
    }  # fmt: skip


def train_ddp(*, steps, kind="mlp", optimizer="sgd", lr=0.1):
    """Train with torch's own data parallelism over all ranks; return weights after every step."""
    model, opt = setting(kind, optimizer, lr)
    wrapped = DistributedDataParallel(model)
    seen = []
    for step in range(steps):
        one_step(wrapped, opt, step)
        seen.append(weights_of(model))
    return {"seen": torch.stack(seen)}


def said_by(call):
    """Return the message of the error that a call raises; None if it raises none."""
    try:
        call()
    except GradweaveError as error:
        return str(error)
    return None
