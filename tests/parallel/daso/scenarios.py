"""What ranks do in tests; see ``worlds``. Each returns what its test looks at."""

import copy
import threading
import time
import warnings
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from gradweave._compat.distributed import default_store
from gradweave.compare.data import digits
from gradweave.errors import ArgumentError, GradweaveError, LostPeerError, UnsupportedError
from gradweave.parallel.daso import DASO
from gradweave.reordering import reorder
from parallel.daso.clock import die_as, leave_for_good, without_a_clock
from parallel.daso.misuse import (  # noqa: F401
    averaged_twice,
    differing,
    failed_attach,
    noisy,
    one_node,
    paper_in_turn,
    parts_with_vectors,
    steps_counted,
    uneven_vectors,
    unfreezes,
    used_often,
    vectors,
)
from parallel.daso.training import loss_of, make_batch, make_model, make_optimizer, weights_of
from parallel.daso.worlds import SECONDS

TIMEOUT = 20


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
    """A plain loop; weights after every step, and what stats() says."""
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
    """The same with torch's own data parallel over all ranks."""
    model, opt = setting(kind, optimizer, lr)
    wrapped = DistributedDataParallel(model)
    seen = []
    for step in range(steps):
        one_step(wrapped, opt, step)
        seen.append(weights_of(model))
    return {"seen": torch.stack(seen)}


def train_paper(*, epochs, epoch_steps, losses, **options):
    model, opt = setting()
    daso = DASO(model, opt, mode="paper", timeout=TIMEOUT, **options)
    seen, rhythm = [], []
    for epoch in range(epochs):
        rhythm.append((daso.rhythm[-1][1], daso.rhythm[-1][2]))
        for step in range(epoch_steps):
            one_step(model, opt, epoch * epoch_steps + step)
            seen.append(weights_of(model))
        daso.epoch_end(losses[epoch] + 0.1 * (dist.get_rank() - 1.5))
        seen.append(weights_of(model))
    daso.detach()
    return {"seen": torch.stack(seen), "rhythm": rhythm}


def progress(*, mode, every, wait, steps):
    """With the same gradient in every step, how far weights get per step, as a share of what SGD does."""
    model = nn.Linear(4, 1, bias=False)
    nn.init.zeros_(model.weight)
    opt = torch.optim.SGD(model.parameters(), lr=1.0)
    options = {"every": every, "wait": wait} if mode == "delta" else {"warm_up": 0, "cool_down": 0}
    daso = DASO(model, opt, mode=mode, payload="float32", timeout=TIMEOUT, **options)
    seen = []
    for _ in range(steps):
        model.weight.sum().neg().backward()
        opt.step()
        opt.zero_grad()
        seen.append(float(model.weight.detach().mean()))
    dist.barrier()
    daso.detach()
    return seen


def inner_ddp(*, steps, **options):
    """DDP inside the node, as a mesh of the user's own says."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
    model, opt = setting()
    wrapped = DistributedDataParallel(model, process_group=mesh.get_group("local"))
    daso = DASO(wrapped, opt, mesh, timeout=TIMEOUT, **options)
    seen = []
    for step in range(steps):
        one_step(wrapped, opt, step)
        seen.append(weights_of(model))
    daso.finish()
    return {"seen": torch.stack(seen), "end": weights_of(model)}


def restarted(model, opt, daso, path, **options):
    """Saves everything, throws it away, and loads it into a new model, optimizer and DASO."""
    torch.save({"m": model.state_dict(), "o": opt.state_dict(), "d": daso.state_dict()}, path)
    dist.barrier()
    daso.detach()
    model, opt = setting()
    with torch.no_grad():
        [p.mul_(3) for p in model.parameters()]
    daso = DASO(model, opt, timeout=TIMEOUT, **options)
    loaded = torch.load(path)
    model.load_state_dict(loaded["m"])
    opt.load_state_dict(loaded["o"])
    daso.load_state_dict(loaded["d"])
    return model, opt, daso


def resume(*, at, steps, folder, **options):
    """The same training in one go, and with everything thrown away and loaded again in the middle."""
    results = []
    for interrupted in (False, True):
        model, opt = setting()
        daso = DASO(model, opt, timeout=TIMEOUT, **options)
        for step in range(steps):
            if interrupted and step == at:
                path = Path(folder) / f"{at}-{dist.get_rank()}.pt"
                model, opt, daso = restarted(model, opt, daso, path, **options)
            one_step(model, opt, step)
        results.append(weights_of(model))
        dist.barrier()
        daso.finish()
        results.append(weights_of(model))
    return results


def save_under_way(*, steps, folder, **options):
    model, opt = setting()
    daso = DASO(model, opt, timeout=TIMEOUT, **options)
    for step in range(steps):
        one_step(model, opt, step)
    state = {"m": model.state_dict(), "o": opt.state_dict(), "d": daso.state_dict()}
    torch.save(state, Path(folder) / f"moved-{dist.get_rank()}.pt")
    dist.barrier()
    daso.detach()
    flight = state["d"]["flight"]
    return weights_of(model), None if flight is None else flight["total"] is not None


def load_elsewhere(*, folder, steps):
    """On other nodes than it was saved on: everybody loads the first rank's."""
    model, opt = setting()
    daso = DASO(model, opt, timeout=TIMEOUT, every=2, wait=1)
    loaded = torch.load(Path(folder) / "moved-0.pt")
    model.load_state_dict(loaded["m"])
    opt.load_state_dict(loaded["o"])
    daso.load_state_dict(loaded["d"])
    begin = weights_of(model)
    for step in range(steps):
        one_step(model, opt, 100 + step)
    daso.finish()
    return begin, weights_of(model), daso.steps


def wrong_weights():
    model, opt = setting()
    daso = DASO(model, opt, timeout=TIMEOUT)
    state = daso.state_dict()
    with torch.no_grad():
        model[0].weight.add_(1)
    try:
        daso.load_state_dict(state)
    except (ArgumentError, UnsupportedError) as error:
        return str(error)
    finally:
        daso.detach()


def uneven(*, counts, **options):
    """Every rank has its own number of batches."""
    model, opt = setting()
    with DASO(model, opt, timeout=TIMEOUT, **options) as daso:
        for step in range(counts[dist.get_rank()]):
            one_step(model, opt, step)
    return weights_of(model), daso.steps


def odd_parameters(*, steps):
    """Frozen, tied, of several dtypes, strided, empty and complex ones, and one that is unfrozen late."""
    torch.manual_seed(1)

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(6, 6)
            self.tied = self.first.weight
            self.narrow = nn.Parameter(torch.randn(6, dtype=torch.bfloat16))
            self.wide = nn.Parameter(torch.randn(6, dtype=torch.float64))
            self.strided = nn.Parameter(torch.randn(3, 6).t())
            self.empty = nn.Parameter(torch.zeros(0, 4))
            self.wave = nn.Parameter(torch.randn(6, dtype=torch.complex64))
            self.late = nn.Parameter(torch.randn(6), requires_grad=False)
            self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
            self.unused = nn.Parameter(torch.randn(3))
            self.added = torch.ones(3, requires_grad=True)

        def forward(self, x):
            x = self.first(x) @ self.tied + self.narrow.float() + self.wide.float() + self.wave.abs()
            return (x + self.late + self.frozen) @ self.strided + self.empty.sum() + self.added

    model = Odd()
    opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    before = model.frozen.clone(), model.unused.clone(), model.late.clone()
    daso = DASO(model, opt, timeout=TIMEOUT, every=3, wait=2, payload="float32")
    for step in range(steps):
        if step == steps // 2:
            model.late.requires_grad_(True)
            opt.add_param_group({"params": [model.added]})
        x, y = make_batch(dist.get_rank(), step)
        F.cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad()
        if step == steps // 2:
            first = torch.cat([model.late, model.added]).detach().clone()
    daso.finish()
    kept = [torch.equal(a, b) for a, b in zip(before, (model.frozen, model.unused, model.late), strict=True)]
    return {**{name: p.detach() for name, p in model.named_parameters()}, "added": model.added.detach()}, kept, first


def accumulation(*, declared):
    """Two micro-batches a step, with and without saying so; both must be one step each."""
    model, opt = setting()
    daso = DASO(model, opt, timeout=TIMEOUT, every=2, wait=1, payload="float32")
    for step in range(6):
        for micro in range(2):
            loss = loss_of(model, dist.get_rank(), 2 * step + micro) / 2
            if declared and micro == 0:
                with daso.no_sync():
                    loss.backward()
            else:
                loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        opt.zero_grad()
    steps = daso.steps
    daso.finish()
    return weights_of(model), steps, norm


def scaled(*, steps, broken, agreed=False, **options):
    """GradScaler's skips: one node sees an infinity in some steps."""
    model, opt = setting()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
    options = {**options, "scaler": scaler} if agreed else options
    daso = DASO(model, opt, timeout=TIMEOUT, every=2, wait=1, **options)
    skipped = 0
    for step in range(steps):
        loss = loss_of(model, dist.get_rank(), step)
        if dist.get_rank() == 3 and step in broken:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        before = weights_of(model)
        scaler.step(opt)
        skipped += int(torch.equal(before, weights_of(model)))
        scaler.update()
        opt.zero_grad()
    counted, last = daso.steps, weights_of(model)
    daso.finish()
    return weights_of(model), skipped, counted, scaler.get_scale(), last


def conditional(*, steps):
    """Ranks that use different parts of a model; what nobody uses has no gradient."""
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(6, 3) for name in ("a", "b", "c")})
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    daso = DASO(model, opt, timeout=TIMEOUT, every=2, wait=1)
    for step in range(steps):
        x, y = make_batch(dist.get_rank(), step)
        F.cross_entropy(model["ab"[dist.get_rank() % 2]](x), y).backward()
        gradients = [p.grad is None for p in model.parameters()]
        opt.step()
        opt.zero_grad()
    daso.finish()
    return gradients, torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def sees_averages():
    """Gradients behind backward() are the node's mean; those inside no_sync() are not."""
    model, opt = setting()
    daso = DASO(model, opt, timeout=TIMEOUT)
    with daso.no_sync():
        loss_of(model, dist.get_rank(), 0).backward()
    own = [p.grad.clone() for p in model.parameters()]
    opt.zero_grad()
    loss_of(model, dist.get_rank(), 0).backward()
    mean = [p.grad.clone() for p in model.parameters()]
    opt.step()
    daso.finish()
    return torch.cat([g.reshape(-1) for g in own]), torch.cat([g.reshape(-1) for g in mean])


def refusals():
    """What cannot be done, with the message; nothing may hang."""
    said = {}

    def refuse(name, make):
        try:
            make()
            said[name] = None
        except GradweaveError as error:
            said[name] = str(error)

    model, opt = setting()
    refuse("world", lambda: DASO(DistributedDataParallel(model), opt))
    refuse("optimizer", lambda: DASO(model, model))
    refuse("lbfgs", lambda: DASO(model, torch.optim.LBFGS(model.parameters())))
    refuse("mesh", lambda: DASO(model, opt, init_device_mesh("cpu", (4,), mesh_dim_names=("all",))))
    daso = DASO(model, opt, timeout=TIMEOUT)
    refuse("twice", lambda: DASO(model, opt))
    daso.detach()
    other = nn.Linear(2 + dist.get_rank() % 2, 1)
    refuse("shapes", lambda: DASO(other, torch.optim.SGD(other.parameters(), lr=0.1), timeout=TIMEOUT))
    sparse = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(sparse.parameters(), lr=0.1)
    daso = DASO(sparse, optimizer, timeout=TIMEOUT)
    refuse("sparse", lambda: sparse(torch.tensor([1])).sum().backward())
    daso.detach()
    return said


def timeline(*, folder):
    model, opt = setting()
    daso = DASO(model, opt, timeout=TIMEOUT, every=3, wait=1)
    for step in range(20):
        one_step(model, opt, step)
    planned, measured = daso.timelines()
    path = Path(folder) / f"{dist.get_rank()}.png"
    daso.save_timeline(path)
    daso.finish()
    return [sorted({span.lane for span in t.spans}) for t in (planned, measured)], path.stat().st_size


def closure(*, steps):
    """Optimizers that are given a closure, as Lightning does; and a copy of the model stays out of it."""
    model, opt = setting()
    daso = DASO(model, opt, timeout=TIMEOUT, every=2, wait=1)
    for step in range(steps):

        def run(step=step):
            opt.zero_grad()
            loss = loss_of(model, dist.get_rank(), step)
            loss.backward()
            return loss

        opt.step(run)
    copied = copy.deepcopy(model)
    loss_of(copied, dist.get_rank(), 0).backward()
    counted = daso.steps
    daso.finish()
    return weights_of(model), counted


def reentrant(*, steps):
    """Checkpointed segments run backwards inside of backward."""
    from torch.utils.checkpoint import checkpoint

    model, opt = setting()
    daso = DASO(model, opt, timeout=TIMEOUT, every=2, wait=1, payload="float32")
    for step in range(steps):
        x, y = make_batch(dist.get_rank(), step)
        x.requires_grad_(True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            F.cross_entropy(checkpoint(model, x, use_reentrant=True), y).backward()
        opt.step()
        opt.zero_grad()
    counted = daso.steps
    daso.finish()
    return weights_of(model), counted


# Faults: each rank says how its training ended.


def faulty(*, clock=True, **arguments):
    """Trains while ranks die or stand still, by a clock or without: see ``clock``."""
    with nullcontext(lambda _: None) if clock else without_a_clock() as knows:
        return train_among_faults(knows=knows, **arguments)


def train_among_faults(
    *, knows, steps, folder, die=None, stop=None, slow=None, late=None, timeout=4, pause=0.02, **options
):
    """The same; ``knows`` is told of the DASO.

    Args:
        die: Rank, step, and where: "before" a step, or "within" it while something is under way.
        stop: Rank, step and seconds that it stands still.
        slow: Rank and seconds that each of its steps takes longer.
        late: Rank, step, and ranks: it stands still, for longer than any timeout, until those are through.
    """
    model, opt = setting()
    rank = dist.get_rank()
    daso = DASO(model, opt, timeout=timeout, checkpoint_dir=Path(folder) / "saved", **options)
    knows(daso)
    node = daso._topology.node
    ended, ranks, at, file = "through", (), None, None
    try:
        for step in range(steps):
            if step == 4:
                Path(folder, f"begun-{rank}").touch()
            if die and die[0] == rank and die[1] == step:
                if die[2] == "before":
                    die_as(node)
                threading.Timer(die[3] if len(die) > 3 else 0.0, die_as, (node,)).start()
            if late and late[0] == rank and late[1] == step:
                leave_for_good(node)
                default_store().wait([f"through/{other}" for other in late[2]], timedelta(seconds=SECONDS))
            if stop and stop[0] == rank and stop[1] == step:
                time.sleep(stop[2])
            time.sleep(pause + (slow[1] if slow and slow[0] == rank else 0.0))
            one_step(model, opt, step)
        daso.finish()
        default_store().set(f"through/{rank}", "")
    except LostPeerError as error:
        ended, ranks, at, file = str(error), error.ranks, error.step, error.checkpoint
    finite = bool(torch.isfinite(weights_of(model)).all())
    saved = None
    if file is not None:
        loaded = torch.load(file)
        saved = torch.cat([v.reshape(-1).float() for v in loaded["model"].values()])
    return {
        "ended": ended, "ranks": ranks, "step": at, "weights": weights_of(model), "finite": finite, "saved": saved,
        "steps": daso.steps, "failed": daso.stats()["failed_exchanges"],
    }  # fmt: skip


def not_finite():
    """One node's weights are spoilt: nobody else may take them over."""
    model, opt = setting()
    attached = DASO(model, opt, timeout=TIMEOUT, every=2, wait=1, checkpoint_dir=f"spoilt-{dist.get_rank()}")
    before = None
    try:
        for step in range(8):
            if step == 3 and dist.get_rank() >= 2:
                with torch.no_grad():
                    model[0].weight[0, 0] = float("nan")
            before = weights_of(model)
            one_step(model, opt, step)
    except LostPeerError as error:
        return str(error), error.ranks, bool(torch.isfinite(before).all())
    finally:
        attached.detach()


def learn_digits(*, way, epochs=12, batch=25):
    """Real data: handwritten digits, of which each rank has its part; the share known of those kept back."""
    x, y = digits()
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(64, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 10))
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    daso = None if way == "ddp" else DASO(model, opt, mode=way, timeout=TIMEOUT, **_DIGITS[way])
    wrapped = DistributedDataParallel(model) if way == "ddp" else model
    for epoch in range(epochs):
        order = torch.randperm(1400, generator=torch.Generator().manual_seed(epoch)).view(-1, size, batch)[:, rank]
        for index in order:
            F.cross_entropy(wrapped(x[index]), y[index]).backward()
            opt.step()
            opt.zero_grad()
        if daso is not None:
            daso.epoch_end(1.0)
    if daso is not None:
        daso.finish()
    model.eval()
    return float((model(x[1400:]).argmax(1) == y[1400:]).float().mean())


_DIGITS = {"delta": {"every": 3, "wait": 2}, "paper": {"warm_up": 2, "cool_down": 2, "total": 12}}


def compiled(*, steps, first):
    """A model behind torch.compile, which is called first or behind DASO."""
    model, opt = setting()
    fast = torch.compile(model, backend="aot_eager") if first else model
    daso = DASO(fast, opt, timeout=TIMEOUT, every=2, wait=1)
    fast = fast if first else torch.compile(model, backend="aot_eager")
    for step in range(steps):
        one_step(fast, opt, step)
    daso.finish()
    return weights_of(model), daso.steps


def reordered(*, steps, first):
    """A model whose weight gradients are computed late."""
    model, opt = setting()
    if first:
        reorder(model, policy="side_stream")
    daso = DASO(model, opt, timeout=TIMEOUT, every=2, wait=1)
    if not first:
        reorder(model, policy="side_stream")
    for step in range(steps):
        one_step(model, opt, step)
    daso.finish()
    return weights_of(model)


def save_behind_a_skip(*, folder):
    """One node leaves a step out at which an exchange is due; all save right behind it, and go on or resume."""
    results = []
    for interrupted in (False, True):
        model, opt = setting()
        daso = DASO(model, opt, timeout=TIMEOUT, every=2, wait=1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
        for step in range(8):
            loss = loss_of(model, dist.get_rank(), step)
            scaler.scale(loss * float("inf") if dist.get_rank() >= 2 and step == 4 else loss).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
            if interrupted and step == 4:
                path = Path(folder) / f"skip-{dist.get_rank()}.pt"
                model, opt, daso = restarted(model, opt, daso, path, every=2, wait=1)
        results.append(weights_of(model))
        daso.finish()
        results.append(weights_of(model))
    return results


def uneven_skip():
    """The last batch that all ranks have is left out, and some ranks have one more."""
    model, opt = setting()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with DASO(model, opt, timeout=TIMEOUT, every=2, wait=1, scaler=scaler):
        for step in range([5, 6, 5, 5][dist.get_rank()]):
            loss = loss_of(model, dist.get_rank(), step)
            scaler.scale(loss * float("inf") if step == 4 else loss).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
    return weights_of(model)


def new_parameters():
    """A layer that comes in late, with other values on every rank."""
    model, opt = setting()
    daso = DASO(model, opt, timeout=TIMEOUT, every=2, wait=1)
    for step in range(7):
        if step == 3:
            torch.manual_seed(dist.get_rank())
            model.append(nn.Linear(3, 3))
            opt.add_param_group({"params": list(model[-1].parameters())})
        one_step(model, opt, step)
    daso.finish()
    return weights_of(model)


def without_backward(*, how):
    """Gradients that no backward of ours has seen the end of."""
    model, opt = setting()
    daso = DASO(model, opt, timeout=TIMEOUT, every=2, wait=1)
    for step in range(6):
        loss = loss_of(model, dist.get_rank(), step)
        if how == "no_sync":
            with daso.no_sync():
                loss.backward()
        else:
            for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
                if p.grad is None or how == "grad":
                    p.grad = g
                else:
                    p.grad.copy_(g)
        opt.step()
        if how != "in place":
            opt.zero_grad()
    counted = daso.steps
    daso.finish()
    return weights_of(model), counted


def several_backwards():
    """Gradients of each loss by themselves, with the graph kept."""
    model, opt = setting()
    daso = DASO(model, opt, timeout=TIMEOUT, every=1, wait=1)
    for step in range(8):
        loss = loss_of(model, dist.get_rank(), step)
        with daso.no_sync():
            for _ in range(2):
                loss.backward(retain_graph=True)
                opt.zero_grad()
        loss.backward()
        opt.step()
        opt.zero_grad()
    daso.finish()
    return weights_of(model)


def resume_unfrozen(*, folder):
    """The first layer is frozen at first; the restarted program does not freeze it any more."""
    results = []
    for interrupted in (False, True):
        model, opt = setting()
        model[0].requires_grad_(False)
        daso = DASO(model, opt, timeout=TIMEOUT, every=4, wait=3)
        for step in range(11):
            if step == 3:
                model[0].requires_grad_(True)
            if interrupted and step == 6:
                path = Path(folder) / f"unfrozen-{dist.get_rank()}.pt"
                model, opt, daso = restarted(model, opt, daso, path, every=4, wait=3)
            one_step(model, opt, step)
        results.append(weights_of(model))
        daso.finish()
    return results


def resume_misfit():
    """Ranks that load checkpoints of different steps go on with the first one's."""
    model, opt = setting()
    daso = DASO(model, opt, timeout=TIMEOUT, every=2, wait=1)
    states = []
    for step in range(6):
        one_step(model, opt, step)
        states.append(copy.deepcopy((model.state_dict(), opt.state_dict(), daso.state_dict())))
    dist.barrier()
    chosen = states[3 if dist.get_rank() == 0 else 5]
    model.load_state_dict(chosen[0])
    opt.load_state_dict(chosen[1])
    daso.load_state_dict(chosen[2])
    begin, steps = weights_of(model), daso.steps
    for step in range(6, 10):
        one_step(model, opt, step)
    daso.finish()
    return begin, steps, weights_of(model)


def partial_group():
    """A group of the user's own that not all ranks are in."""
    dist.new_group([0, 2])
    return train(steps=5, every=2, wait=1)["end"]


def overflow():
    """What each node sends is finite; the sum is not, in 16 bits."""
    model = nn.Linear(2, 1, bias=False)
    opt = torch.optim.SGD(model.parameters(), lr=1.0)
    daso = DASO(model, opt, timeout=TIMEOUT, every=2, wait=1, payload="float16", checkpoint_dir="overflown")
    with torch.no_grad():
        model.weight.add_(50_000)
    try:
        for _ in range(4):
            model.weight.sum().backward()
            opt.step()
            opt.zero_grad()
    except LostPeerError as error:
        return str(error), bool(torch.isfinite(model.weight).all())
    finally:
        daso.detach()
