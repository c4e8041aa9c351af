"""What ranks do in tests of attaching and letting go; see ``daso.worlds``."""

import gc
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from gradweave.errors import GradweaveError
from gradweave.parallel.data_parallel import DataParallel
from parallel.data_parallel.loops import backward, finish
from parallel.data_parallel.models import make, optimizer_of, weights


def _open():
    return tuple(len(list(Path(f"/proc/self/{what}").iterdir())) for what in ("fd", "task"))


def uses(*, policy, times=6):
    """Open files and threads behind the first use, and behind more."""
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


def _traces(model, opt):
    """Whatever attaching leaves on a model and its optimizer."""
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
    """Lets the n-th call of any function that attaching may need fail."""

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
    """Attaches with a failure at the first call, at the second, and so on; what is left, and that it still trains."""
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


def refuses(*, what):
    """One rank has something else than the other; what each hears."""
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
