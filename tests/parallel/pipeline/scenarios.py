"""What ranks do in tests: each function runs on every rank of a world."""

import torch
import torch.distributed as dist

from gradweave.errors import GradweaveError
from gradweave.parallel.pipeline import Pipeline
from parallel.pipeline.models import batch, loss_fn, make, stock_step


def gradients(name, microbatches=4, steps=2, **options):
    """Largest difference of any gradient, buffer or loss from training without a pipeline, after some steps."""
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


def accumulation(microbatches=2):
    """Two steps whose gradients add up, each with half of the loss."""
    pipe = Pipeline(make("tied"), loss_fn, microbatches=microbatches, policy="modulo", group=1, timeout=20)
    stock = make("tied")
    for step in range(2):
        stock_step(stock, "tied", microbatches, seed=step, factor=0.5)
        pipe.step(*batch("tied", seed=step), loss_factor=0.5)
    grads = {n: p.grad for n, p in stock.named_parameters(remove_duplicate=False)}
    for n, p in pipe.module.named_parameters(remove_duplicate=False):
        torch.testing.assert_close(p.grad, grads[n], rtol=1e-5, atol=1e-7, msg=n)
    pipe.close()


def training(name, policy, fused=False, clip=None, steps=3, **options):
    """Weights after training, and norms, against training without a pipeline; 0 where they are the same."""
    from torch.nn.utils import clip_grad_norm_
    from torch.optim import AdamW

    from gradweave.fusion import fuse

    pipe = Pipeline(make(name), loss_fn, microbatches=4, policy=policy, timeout=20, **options)
    stock = make(name)
    ours, theirs = AdamW(pipe.module.parameters(), lr=0.01), AdamW(stock.parameters(), lr=0.01)
    fusion = fuse(pipe.module, ours, mode="forward") if fused else None
    worst = 0.0
    for step in range(steps):
        stock_step(stock, name, 4, seed=step)
        pipe.step(*batch(name, seed=step))
        if clip is not None:
            wanted, found = clip_grad_norm_(stock.parameters(), clip), pipe.clip_grad_norm_(clip)
            worst = max(worst, float((wanted - found).abs()))
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    held = pipe.most_bytes_held
    if fusion is not None:
        fusion.detach()
    weights = stock.state_dict()
    for n, value in pipe.state_dict().items():
        worst = max(worst, float((value - weights[n]).abs().max()))
    pipe.close()
    return {"worst": worst, "held": held}


def fused_in_backward():
    from torch.optim import SGD

    from gradweave.fusion import fuse

    pipe = Pipeline(make("gpt"), loss_fn, microbatches=4, policy="fast_forward", timeout=20)
    with fuse(pipe.module, SGD(pipe.module.parameters(), lr=0.1), mode="backward"):
        return raised(lambda: pipe.step(*batch("gpt")))


def checkpoints(folder):
    """Saves a pipeline's state whole and by DCP, and loads both into other pipelines and the plain model."""
    from torch.distributed import checkpoint

    pipe = Pipeline(make("gpt"), loss_fn, microbatches=2, policy="modulo", group=1, timeout=20)
    pipe.step(*batch("gpt"))
    whole = pipe.gather_state_dict()
    plain = make("gpt", seed=5)
    if pipe.has_first_stage:
        assert list(whole) == list(plain.state_dict())
        torch.save(whole, f"{folder}/whole.pt")
        plain.load_state_dict(whole)
    else:
        assert whole is None
    checkpoint.save({"model": pipe.state_dict()}, checkpoint_id=f"{folder}/dcp")
    dist.barrier()
    other = Pipeline(make("gpt", seed=7), loss_fn, microbatches=2, policy="fast_forward", timeout=20)
    other.load_state_dict(torch.load(f"{folder}/whole.pt"))
    wanted = make("gpt").state_dict()
    for n, value in other.state_dict().items():
        assert torch.equal(value, wanted[n]), n
    third = Pipeline(make("gpt", seed=8), loss_fn, microbatches=2, policy="gpipe", timeout=20)
    state = {"model": third.state_dict()}
    checkpoint.load(state, checkpoint_id=f"{folder}/dcp")
    third.load_state_dict(state["model"])
    for n, value in third.state_dict().items():
        assert torch.equal(value, wanted[n]), n
    message = raised(lambda: other.load_state_dict({}))
    for one in (pipe, other, third):
        one.close()
    return message


def optimizer_state(folder):
    """Optimizer state by global names, through torch's own helpers, into a pipeline that is cut otherwise."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
    from torch.optim import AdamW

    def make_one(seed, **options):
        pipe = Pipeline(make("gpt", seed=seed), loss_fn, microbatches=2, timeout=20, **options)
        return pipe, AdamW(pipe.module.parameters(), lr=0.01)

    def train(pipe, optimizer, seeds):
        for seed in seeds:
            pipe.step(*batch("gpt", seed=seed))
            optimizer.step()
            optimizer.zero_grad()

    first, one = make_one(0, policy="modulo", group=1)
    train(first, one, range(2))
    state = {"model": first.state_dict(), "optimizer": get_optimizer_state_dict(first.module, one)["state"]}
    checkpoint.save(state, checkpoint_id=f"{folder}/both")
    dist.barrier()
    train(first, one, range(2, 4))

    second, two = make_one(3, policy="fast_forward")
    empty = get_optimizer_state_dict(second.module, two)
    state = {"model": second.state_dict(), "optimizer": empty["state"]}
    checkpoint.load(state, checkpoint_id=f"{folder}/both")
    second.load_state_dict(state["model"])
    set_optimizer_state_dict(second.module, two, {**empty, "state": state["optimizer"]})
    train(second, two, range(2, 4))
    result = first.gather_state_dict(), second.gather_state_dict()
    first.close()
    second.close()
    return result


def raised(action):
    """The text of what an action raises."""
    try:
        action()
    except GradweaveError as error:
        return f"{type(error).__name__}: {error}"
    except RuntimeError as error:
        return f"RuntimeError: {error} {error.__cause__}"
    return None


def refused(name="gpt", different=None, **options):
    """What construction raises; ``different`` is given to rank 1 instead."""
    options.setdefault("microbatches", 4)
    options.setdefault("timeout", 20)
    if different is not None and dist.get_rank() == 1:
        name = different.pop("name", name)
        options.update(different)
    return raised(lambda: Pipeline(make(name), loss_fn, **options))


def wrong_batch(sizes):
    """What a step raises that has batches of these sizes, by rank; and what the next one does."""
    pipe = Pipeline(make("gpt"), loss_fn, microbatches=4, policy="modulo", group=1, timeout=20)
    pipe.step(*batch("gpt"))
    size = sizes[dist.get_rank()]
    return raised(lambda: pipe.step(*batch("gpt", size=size))), raised(lambda: pipe.step(*batch("gpt")))


class _Growing(torch.nn.Module):
    """A layer whose output depends on the data: longer for one micro-batch."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(6, 6)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x) if self.calls < 4 else self.linear(x).repeat(1, 2)


class _Failing(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(6, 6)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls > 2:
            raise ValueError("this layer has had enough")
        return self.linear(x)


def odd_layer(kind):
    import time

    odd = {"growing": _Growing, "failing": _Failing}[kind]
    layers = [torch.nn.Linear(6, 6), odd(), *(torch.nn.Linear(6, 6) for _ in range(2 * dist.get_world_size() - 2))]
    pipe = Pipeline(torch.nn.Sequential(*layers), loss_fn, microbatches=4, policy="modulo", group=1, timeout=20)
    began = time.monotonic()
    message = raised(lambda: pipe.step(*batch("mlp")))
    return message, time.monotonic() - began


def death(victim):
    """What the others say of a rank that dies, and after how long."""
    import os
    import time

    layers = [torch.nn.Linear(6, 6) for _ in range(2 * dist.get_world_size())]
    pipe = Pipeline(torch.nn.Sequential(*layers), loss_fn, microbatches=4, policy="modulo", group=1, timeout=20)
    pipe.step(*batch("mlp"))
    if dist.get_rank() == victim:
        os._exit(1)
    began = time.monotonic()
    message = raised(lambda: pipe.step(*batch("mlp")))
    return message, time.monotonic() - began


def autocast(policy):
    """Largest difference from stock training under autocast in bfloat16."""
    pipe = Pipeline(make("gpt"), loss_fn, microbatches=4, policy=policy, timeout=20)
    stock = make("gpt")
    x, target = batch("gpt")
    for x_part, target_part in zip(x.chunk(4), target.chunk(4), strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_fn(stock(x_part), target_part)
        (loss / 4).backward()
    with torch.autocast("cpu", torch.bfloat16):
        pipe.step(x, target)
    grads = {n: p.grad for n, p in stock.named_parameters()}
    worst = max(float((p.grad - grads[n]).abs().max()) for n, p in pipe.module.named_parameters())
    pipe.close()
    return worst


def hooks():
    """Hooks on a gradient are called for each micro-batch, and may change it."""
    pipe = Pipeline(make("gpt"), loss_fn, microbatches=2, policy="fast_forward", timeout=20)
    stock = make("gpt")
    heard = []
    for model in (pipe.module, stock):
        for n, p in model.named_parameters():
            if n.endswith("up.weight"):
                p.register_hook(lambda grad: 2 * grad)
                p.register_post_accumulate_grad_hook(lambda p: heard.append(p))
    stock_step(stock, "gpt", 2)
    before = len(heard)
    pipe.step(*batch("gpt"))
    grads = {n: p.grad for n, p in stock.named_parameters()}
    for n, p in pipe.module.named_parameters():
        assert torch.equal(p.grad, grads[n]), n
    own = sum(n.endswith("up.weight") for n, _ in pipe.module.named_parameters())
    pipe.close()
    return len(heard) - before == 2 * own


def in_groups():
    """Two pipelines of two ranks each, side by side, on groups of the user's."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[dist.get_rank() // 2]
    return gradients("gpt", policy="modulo", group=2, process_group=mine)["worst"]


def planned(costs, **options):
    """The plan made from the first rank's costs."""
    given = costs if dist.get_rank() == 0 else None
    pipe = Pipeline(make("gpt"), loss_fn, microbatches=4, costs=given, timeout=20, **options)
    loss = pipe.step(*batch("gpt"))
    plan = pipe.plan
    pipe.close()
    return {
        "policy": plan.program.policy,
        "layers": [len(run) for run in plan.runs],
        "cap": plan.program.max_in_flight,
        "peak": plan.peak_bytes,
        "loss": loss,
        "held": pipe.most_bytes_held,
    }


def measured():
    """What is chosen from costs that the first rank has measured."""
    from gradweave.parallel.pipeline import measure_layers

    model = make("gpt")
    x, target = batch("gpt")
    costs = measure_layers(model, loss_fn, (x[:2], target[:2])) if dist.get_rank() == 0 else None
    pipe = Pipeline(model, loss_fn, microbatches=4, policy="auto", costs=costs, timeout=20)
    pipe.step(x, target)
    pipe.close()
    return pipe.plan.program.policy, [len(run) for run in pipe.plan.runs], pipe.plan.seconds


def _set_trained(model, names, trained):
    for n, p in model.named_parameters():
        if n.partition(".")[0] in names:
            p.requires_grad_(trained)


def frozen_or_thawed_later(policy, trained_first):
    """What the step raises before which all layers of the first stage are frozen, or thawed; else what differs."""
    model, stock = make("linears"), make("linears")
    for one in (model, stock):
        _set_trained(one, "01", trained_first)
    pipe = Pipeline(model, loss_fn, microbatches=4, policy=policy, timeout=20)
    message = None
    for trained in (trained_first, not trained_first):
        for one in (pipe.module, stock):
            _set_trained(one, "01", trained)
        stock_step(stock, "linears", 4)
        message = raised(lambda: pipe.step(*batch("linears")))
    wanted = dict(stock.named_parameters())
    pairs = [] if message else [(n, p.grad, wanted[n].grad) for n, p in pipe.module.named_parameters()]
    pipe.close()
    return message, [n for n, grad, other in pairs if not torch.equal(grad, other)]


def a_step(name, **options):
    """What a step of a model raises."""
    pipe = Pipeline(make(name), loss_fn, microbatches=4, timeout=20, **options)
    return raised(lambda: pipe.step(*batch(name)))


def tied_weight_frozen_on_one_rank():
    """What is raised after a weight that two ranks share was frozen on the second of them alone."""
    pipe = Pipeline(make("tied"), loss_fn, microbatches=4, policy="fast_forward", timeout=20)
    if pipe.has_last_stage:
        pipe.module[-1].out.weight.requires_grad_(False)
    return raised(lambda: pipe.step(*batch("tied")))


def torn_state(reshaped=False):
    """What loading raises where the last rank lacks an entry; whether weights are as before; what a step raises."""
    pipe = Pipeline(make("linears"), loss_fn, microbatches=4, policy="fast_forward", timeout=20)
    before = {n: value.clone() for n, value in pipe.state_dict().items()}
    state = make("linears", seed=3).state_dict()
    state["3.weight"] = torch.zeros(6, 7)
    if not reshaped:
        del state["3.weight"]
    message = raised(lambda: pipe.load_state_dict(state))
    same = all(torch.equal(value, before[n]) for n, value in pipe.state_dict().items())
    after = raised(lambda: pipe.step(*batch("linears")))
    pipe.close()
    return message, same, after


def a_loss_that_speaks_of_connections():
    """What is raised where a user's loss fails with words that torch has for a lost rank."""

    def failing(output, target):
        raise RuntimeError("metrics server: connection refused, timed out")

    pipe = Pipeline(make("linears"), failing, microbatches=4, policy="fast_forward", timeout=20)
    return raised(lambda: pipe.step(*batch("linears")))


KEPT = []


def a_failure_that_is_kept(kind):
    """Seconds until a rank knows that the first one has failed, while all keep the error that they have caught."""
    import time

    layer = {"forward": _Failing, "backward": _NoWayBack}[kind]
    rest = (torch.nn.Linear(6, 6) for _ in range(2 * dist.get_world_size() - 1))
    pipe = Pipeline(torch.nn.Sequential(layer(), *rest), loss_fn, microbatches=4, policy="fast_forward", timeout=20)
    began = time.monotonic()
    try:
        pipe.step(*batch("mlp"))
    except Exception as error:
        KEPT.append(error)
    return time.monotonic() - began


class _Barrier(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("no way back")


class _NoWayBack(torch.nn.Module):
    """A layer whose backward fails, after the trial run."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(6, 6)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x) if self.calls == 1 else _Barrier.apply(self.linear(x))


def descriptors(count=4):
    """How many more files are open after some pipelines were made, used and closed; the store's close a bit later."""
    import time
    from pathlib import Path

    def opened():
        return len(list(Path("/proc/self/fd").iterdir()))

    before = opened()
    for _ in range(count):
        pipe = Pipeline(make("linears"), loss_fn, microbatches=4, policy="fast_forward", timeout=20)
        pipe.step(*batch("linears"))
        pipe.close()
    ends = time.monotonic() + 5
    while opened() >= before + count and time.monotonic() < ends:
        time.sleep(0.05)
    return opened() - before


def closed_by_one():
    """Seconds that closing takes on the first rank, which the other one does later; then another pipeline works."""
    import time

    pipe = Pipeline(make("linears"), loss_fn, microbatches=4, policy="fast_forward", timeout=20)
    pipe.step(*batch("linears"))
    began = time.monotonic()
    if dist.get_rank() == 0:
        pipe.close()
    seconds = time.monotonic() - began
    dist.barrier()
    pipe.close()
    return seconds, a_step("linears", policy="fast_forward")


def closed_between_groups():
    """Pipelines of some ranks, before and after one of all ranks is closed: torch could name two groups alike."""
    some = dist.new_group([0, 1])
    mine = {"microbatches": 4, "policy": "fast_forward", "timeout": 20, "process_group": some}
    inside = dist.get_rank() < 2
    everybody = Pipeline(make("mlp"), loss_fn, microbatches=4, policy="fast_forward", timeout=20)
    if inside:
        first = Pipeline(make("linears"), loss_fn, **mine)
    everybody.step(*batch("mlp"))
    everybody.close()
    if not inside:
        return None
    first.close()
    second = Pipeline(make("linears"), loss_fn, **mine)
    message = raised(lambda: second.step(*batch("linears")))
    second.close()
    return message


def refused_steps(how):
    """What some ranks, or all, refuse of a step; whether the pipeline goes on; its gradients' distance from stock's."""
    pipe = Pipeline(make("linears"), loss_fn, microbatches=4, policy="fast_forward", timeout=20)
    x, y = batch("linears", seed=0)
    odd = {
        "smaller": lambda: pipe.step(x[:4], y[:4]),
        "no grad": lambda: torch.no_grad()(pipe.step)(x, y),
        "first without a target": lambda: pipe.step(x, None),
        "first with a dict": lambda: pipe.step({"x": x}, y),
        "first with a tuple": lambda: pipe.step(x, (y, y)),
        "first not a multiple": lambda: pipe.step(x[:6], y[:6]),
    }[how]
    if not how.startswith("first"):
        pipe.step(x, y)
        pipe.module.zero_grad()
    said = raised(odd)
    pipe.step(x, y)
    stock = make("linears")
    stock_step(stock, "linears", 4, seed=0)
    grads = {n: p.grad for n, p in stock.named_parameters()}
    worst = max(float((p.grad - grads[n]).abs().max()) for n, p in pipe.module.named_parameters())
    pipe.close()
    return said, worst


class _Viewing(torch.nn.Module):
    """A layer whose output is a view."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(6, 6)

    def forward(self, x):
        return self.linear(x.reshape(-1, 6)).view(-1, 2, 6)


def views(split, policy):
    """Largest difference of a gradient where all stages hand on views."""
    torch.manual_seed(0)
    layers = [_Viewing() for _ in range(2 * dist.get_world_size())]
    torch.manual_seed(0)
    stock = torch.nn.Sequential(*[_Viewing() for _ in layers])
    x, y = torch.randn(8, 2, 6), torch.randn(8, 2, 6)
    pipe = Pipeline(torch.nn.Sequential(*layers), loss_fn, microbatches=4, policy=policy, split=split, timeout=20)
    pipe.step(x, y)
    for one, other in zip(x.chunk(4), y.chunk(4), strict=True):
        (loss_fn(stock(one), other) / 4).backward()
    grads = {n: p.grad for n, p in stock.named_parameters()}
    worst = max(float((p.grad - grads[n]).abs().max()) for n, p in pipe.module.named_parameters())
    pipe.close()
    return worst


def reentrant():
    """What a checkpoint that cannot be split says, and what is left."""
    from torch.utils.checkpoint import checkpoint

    class Recomputed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(6, 6)

        def forward(self, x):
            return checkpoint(self.linear, x, use_reentrant=True)

    layers = [torch.nn.Linear(6, 6), *(Recomputed() for _ in range(3))]
    pipe = Pipeline(torch.nn.Sequential(*layers), loss_fn, microbatches=4, policy="fast_forward", timeout=20)
    said = raised(lambda: pipe.step(*batch("linears")))
    return said, [p.grad is None for p in pipe.module.parameters()]
