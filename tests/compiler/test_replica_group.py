"""Compiled steps on two ranks that average gradients, against DistributedDataParallel.

A function above a test runs on every rank, and returns what its test looks at.
"""

import copy
import logging
import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import gradweave
from gradweave import _logging, optim
from gradweave._compat.distributed import finishes_sum, starts_sum
from gradweave._runtime.deferred.pending_parameter import PendingParameter
from gradweave.compiler import replica_group
from gradweave.step_graph.nodes import phase_of
from parallel.data_parallel.models import batch, make, optimizer_of
from worlds import World


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two ranks."""
    world = World(tmp_path_factory.mktemp("two"), 2, 1)
    yield world
    world.close()


def loss_fn(model, x, y):
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


def result_of(model, opt, losses, norms):
    state = [s[key].clone() for s in opt.state.values() for key in sorted(s)]
    return {
        "weights": [p.detach().clone() for p in model.parameters()],
        "buffers": [b.clone() for b in model.buffers()],
        "state": state, "losses": losses, "norms": norms,
    }  # fmt: skip


def with_ddp(kind, optimizer, *, steps=5, accumulate=1, clip=None, scaled=False, change=None, bf16=False):
    """Train as one does without gradweave."""
    model, rank = make(kind), dist.get_rank()
    opt = optimizer_of(model.parameters(), optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) if scaled else None
    wrapped = DistributedDataParallel(model, find_unused_parameters=kind == "tied")
    if bf16:  # torch's own hook, behind a name for which DDP does not insist on NCCL
        wrapped.register_comm_hook(None, lambda state, bucket: bf16_compress_hook(state, bucket))
    losses, norms = [], []
    for step in range(steps):
        if change is not None and change(step, model):
            wrapped = DistributedDataParallel(model)
        for part in range(accumulate):
            x, y = batch(kind, 10 * step + part, rank)
            wrapped.require_backward_grad_sync = part == accumulate - 1
            loss = loss_fn(wrapped, x, y)
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None:
            scaler.unscale_(opt)
        if clip is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        opt.step() if scaler is None else scaler.step(opt)
        if scaler is not None:
            scaler.update()
        opt.zero_grad()
        schedule.step()
        losses.append(loss.item())
    return result_of(model, opt, losses, norms)


def compiled(
    kind, optimizer, *, lower, steps=5, accumulate=1, clip=None, scaled=False, change=None, differ=False, **options
):
    """Train by one compiled step; return the same, and how steps were taken."""
    model, rank = make(kind), dist.get_rank()
    if differ:
        with torch.no_grad():
            for p in model.parameters():
                p.add_(rank)
    opt = optimizer_of(model.parameters(), optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) if scaled else None
    step_of = gradweave.compile(
        model, loss_fn, opt, mesh=dist.group.WORLD, max_grad_norm=clip, scaler=scaler, lower=lower, **options
    )
    losses, norms = [], []
    for step in range(steps):
        if change is not None:
            change(step, model)
        for part in range(accumulate - 1):
            with step_of.no_update():
                step_of(*batch(kind, 10 * step + part, rank))
        losses.append(step_of(*batch(kind, 10 * step + accumulate - 1, rank)).item())
        if clip is not None:
            norms.append(step_of.grad_norm.item())
        schedule.step()
    result = result_of(model, opt, losses, norms)
    result |= {"reason": step_of.eager_reason, "explain": step_of.explain()}
    step_of.detach()
    return result


def both(**options):
    ways = {"lower": options.pop("lower", "replay")}
    ways |= {key: options.pop(key) for key in ("differ", "reduce_dtype", "policy") if key in options}
    return with_ddp(**options, bf16="reduce_dtype" in ways), compiled(**options, **ways)


def assert_same(results, *, tolerance=None):
    """Compare both ways on each rank, and the weights of all ranks."""
    for expected, made in results.values():
        assert made["reason"] is None
        assert made["explain"].startswith("lower=")
        for key in ("weights", "buffers", "state"):
            assert len(made[key]) == len(expected[key])
            for one, other in zip(made[key], expected[key], strict=True):
                if tolerance is None:
                    assert torch.equal(one, other), (key, (one - other).abs().max())
                else:
                    torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
        if tolerance is None:
            assert (made["losses"], made["norms"]) == (expected["losses"], expected["norms"])
    weights = [made["weights"] for _, made in results.values()]
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("kind", ["mlp", "conv", "gpt"])
def test_replayed_steps_are_those_of_ddp_bit_for_bit(two, kind, optimizer):
    results = two.run(both, kind=kind, optimizer=optimizer)
    assert_same(results)
    assert "1 graph(s)" in results[0][1]["explain"]


def test_weights_that_differ_at_first_become_those_of_the_first_rank(two):
    assert_same(two.run(both, kind="mlp", optimizer="sgd", differ=True))


def test_a_weight_used_twice_one_frozen_and_one_unused(two):
    results = two.run(both, kind="tied", optimizer="adamw")
    assert_same(results)
    assert "1 graph(s)" in results[0][1]["explain"]


def test_micro_batches_are_averaged_once_with_the_last(two):
    assert_same(two.run(both, kind="conv", optimizer="adamw", accumulate=3))


def test_the_common_norm_is_that_of_averages(two):
    assert_same(two.run(both, kind="mlp", optimizer="sgd", clip=0.05))


def test_a_loss_scale_is_the_same_on_all_ranks(two):
    assert_same(two.run(both, kind="mlp", optimizer="sgd", scaled=True, clip=0.05))


@pytest.mark.parametrize("options", [{}, {"accumulate": 2, "clip": 0.1}])
def test_gradients_may_travel_in_bfloat16(two, options):
    assert_same(two.run(both, kind="mlp", optimizer="sgd", reduce_dtype=torch.bfloat16, **options))


def test_a_type_that_gradients_cannot_travel_in_is_refused(two):
    errors = two.run(refused, reduce_dtype=torch.int8)
    assert "reduce_dtype=torch.int8" in errors[1]


def test_compiled_steps_are_those_of_ddp_to_rounding(two):
    assert_same(two.run(both, kind="mlp", optimizer="sgd", lower="inductor", clip=0.5), tolerance=1e-5)


def several_messages(**options):
    """Send each layer by itself."""
    before, replica_group.MESSAGE_BYTES = replica_group.MESSAGE_BYTES, 1
    try:
        return both(**options)
    finally:
        replica_group.MESSAGE_BYTES = before


@pytest.mark.parametrize("lower", ["replay", "inductor"])
def test_messages_of_single_layers_carry_the_same(two, lower):
    results = two.run(several_messages, kind="mlp", optimizer="sgd", lower=lower, accumulate=2)
    assert_same(results, tolerance=None if lower == "replay" else 1e-5)
    assert "2 ranks average 5 message(s)" in results[0][1]["explain"]


def freezes(step, model):
    """Freeze a layer, and later thaw it; return whether DistributedDataParallel has to be made anew."""
    if step in (2, 4):
        model[0].requires_grad_(step == 4)
    return step in (2, 4)


def several_trainings(trainings):
    """Train in several ways, messages of single layers, and hold all of them against DistributedDataParallel."""
    return [several_messages(**training) for training in trainings]


NO_BARRIER = [
    {"kind": "mlp", "optimizer": "adamw"},
    {"kind": "conv", "optimizer": "sgd"},
    {"kind": "gpt", "optimizer": "adamw", "steps": 3},
    {"kind": "tied", "optimizer": "sgd"},
    {"kind": "mlp", "optimizer": "sgd", "clip": 0.1},
    {"kind": "mlp", "optimizer": "adamw", "scaled": True},
    {"kind": "mlp", "optimizer": "sgd", "accumulate": 2},
    {"kind": "mlp", "optimizer": "sgd", "reduce_dtype": torch.bfloat16},
    {"kind": "mlp", "optimizer": "sgd", "steps": 7, "change": freezes},
]


@pytest.mark.parametrize("policy", ["no_barrier", "reverse_first_k"])
def test_steps_without_a_barrier_are_those_of_ddp_bit_for_bit(two, policy, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = two.run(several_trainings, trainings=[{**training, "policy": policy} for training in NO_BARRIER])
    for number, training in enumerate(NO_BARRIER):
        assert_same({rank: results[number] for rank, results in found.items()})
        explained = found[0][number][1]["explain"]
        assert f"by policy '{policy}' on gpu0 main, link" in explained, training


def test_compiled_steps_without_a_barrier_are_those_of_ddp_to_rounding(two):
    options = {"kind": "mlp", "optimizer": "sgd", "lower": "inductor", "policy": "no_barrier"}
    assert_same(two.run(several_messages, **options), tolerance=1e-5)


def crossing_the_border():
    """Return which updates a step leaves to the next one, and what it has run when its call returns."""
    replica_group.MESSAGE_BYTES, before = 1, replica_group.MESSAGE_BYTES
    try:
        model, rank = make("mlp"), dist.get_rank()
        opt = optimizer_of(model.parameters(), "sgd")
        step_of = gradweave.compile(model, loss_fn, opt, mesh=dist.group.WORLD, lower="replay", policy="no_barrier")
        for number in range(7):  # after some of the first ones weights are compared
            step_of(*batch("mlp", number, rank))
        pending = [type(p) is PendingParameter for p in model.parameters()]
        spans = step_of.timeline(*batch("mlp", 7, rank)).spans
        weights = [p.detach().clone() for p in model.parameters()]
        return pending, [f"{span.task.kind}{span.task.layer}" for span in spans], weights
    finally:
        replica_group.MESSAGE_BYTES = before


def test_updates_wait_for_their_messages_in_the_next_step(two):
    found = two.run(crossing_the_border)
    pending, order, _ = found[0]
    assert all(pending)
    own = [task for task in order if task[0] != "C"]  # a message is issued when it can be, beside what comes next
    assert " ".join(own) == "U0 F0 U1 F1 U2 F2 U3 F3 U4 F4 W4 X4 W3 X3 W2 X2 W1 X1 W0 X0"
    assert [task for task in order if task[0] == "C"] == ["C4", "C3", "C2", "C1", "C0"]
    assert all(order.index(f"W{layer}") < order.index(f"C{layer}") for layer in range(5))
    assert order.index("C4") < order.index("W3")
    assert all(torch.equal(*pair) for pair in zip(found[0][2], found[1][2], strict=True))


def order_of_a_step():
    """Return where in a step's graph messages are sent, where backward ends, and where the first one is waited for."""
    before, buckets_size = replica_group.MESSAGE_BYTES, 1
    replica_group.MESSAGE_BYTES = buckets_size
    try:
        model = make("gpt")
        opt = optimizer_of(model.parameters(), "adamw")
        step_of = gradweave.compile(model, loss_fn, opt, mesh=dist.group.WORLD, lower="replay", max_grad_norm=1.0)
        for number in range(3):
            step_of(*batch("gpt", number, dist.get_rank()))
    finally:
        replica_group.MESSAGE_BYTES = before
    (program,) = step_of._captured.open().programs
    nodes = list(program._variants[-1].traced.graph.graph.nodes)
    sends = [place for place, node in enumerate(nodes) if starts_sum(node)]
    waits = [place for place, node in enumerate(nodes) if finishes_sum(node)]
    return sends, waits, max(place for place, node in enumerate(nodes) if phase_of(node) == "backward")


def test_messages_leave_while_backward_goes_on(two):
    sends, waits, end = two.run(order_of_a_step)[0]
    assert len(sends) == len(waits) > 5
    assert sum(place < end for place in sends) >= len(sends) - 2
    assert min(waits) > end


def test_layers_are_frozen_and_thawed(two):
    assert_same(two.run(both, kind="mlp", optimizer="sgd", steps=7, change=freezes))


class Branches(nn.Module):
    """Two layers, of which a batch says which are used."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.never = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(2, 2)

    def forward(self, x, which):
        x = self.first(x)
        return self.second(x) if which else x


def branches(*, way, used):
    """Train a layer that is used by some ranks in some steps; ``used`` has the steps of each rank."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Branches()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)

    def loss_of(model, x, which):
        return model(x, which).square().mean()

    if way == "ddp":
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    else:
        step_of = gradweave.compile(model, loss_of, opt, mesh=dist.group.WORLD, lower="replay")
    for number, which in enumerate(used[rank]):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * number + rank))
        if way == "ddp":
            loss_of(wrapped, x, which).backward()
            opt.step()
            opt.zero_grad()
        else:
            step_of(x, which)
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(
    "used",
    [
        [[1, 1, 1, 0, 1, 0], [1, 1, 0, 1, 1, 0]],  # some steps by one rank, some by none
        [[1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1]],  # not by the second rank at first
        [[0, 0, 1, 1, 0, 1], [0, 0, 1, 1, 1, 1]],  # by none at first
    ],
)
def test_layers_that_some_ranks_use_in_some_steps(two, used):
    expected, made = (two.run(branches, way=way, used=used) for way in ("ddp", "ours"))
    for rank in range(2):
        for one, other in zip(made[rank], expected[rank], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


def shapes(*, way, sizes, policy="auto"):
    """Train on batches of other sizes on each rank."""
    rank, model = dist.get_rank(), make("mlp")
    opt = optimizer_of(model.parameters(), "sgd")
    if way == "ddp":
        wrapped = DistributedDataParallel(model)
    else:
        step_of = gradweave.compile(
            model, loss_fn, opt, mesh=dist.group.WORLD, lower="replay", new_shapes="eager", variants=2,
            policy=policy,
        )  # fmt: skip
    for number, size in enumerate(sizes[rank]):
        x, y = batch("mlp", number, rank)
        if way == "ddp":
            loss_fn(wrapped, x[:size], y[:size]).backward()
            opt.step()
            opt.zero_grad()
        else:
            step_of(x[:size], y[:size])
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("policy", ["auto", "no_barrier"])
def test_a_rank_may_step_eagerly_while_another_has_a_graph(two, policy):
    sizes = [[6, 6, 6, 4, 6, 3], [6, 6, 5, 6, 6, 6]]
    expected, made = (two.run(shapes, way=way, sizes=sizes, policy=policy) for way in ("ddp", "ours"))
    for rank in range(2):
        assert all(torch.equal(one, other) for one, other in zip(made[rank], expected[rank], strict=True))


def resumes():
    """Train five steps, in one go and with a checkpoint after two."""
    rank = dist.get_rank()

    def start(saved=None):
        model = make("conv")
        opt = optimizer_of(model.parameters(), "adamw")
        if saved is not None:
            model.load_state_dict(saved[0])
            opt.load_state_dict(saved[1])
        return model, opt, gradweave.compile(model, loss_fn, opt, mesh=dist.group.WORLD, lower="replay")

    model, opt, step_of = start()
    saved = None
    for number in range(5):
        if number == 2:
            saved = copy.deepcopy((model.state_dict(), opt.state_dict()))
        step_of(*batch("conv", number, rank))
    again, _, step_of = start(saved)
    for number in range(2, 5):
        step_of(*batch("conv", number, rank))
    return [
        list(model.state_dict()),
        [torch.equal(*pair) for pair in zip(model.parameters(), again.parameters(), strict=True)],
    ]


def test_a_checkpoint_has_plain_names_and_training_goes_on_from_it_bit_for_bit(two):
    for names, equal in two.run(resumes).values():
        assert names == list(make("conv").state_dict())
        assert all(equal)


def refused(**options):
    """Return the error of compiling with other options on the second rank."""
    model = make("mlp")
    opt = optimizer_of(model.parameters(), "sgd")
    options = options if dist.get_rank() else {}
    try:
        gradweave.compile(model, loss_fn, opt, mesh=dist.group.WORLD, **options)
    except gradweave.GradweaveError as error:
        return str(error)
    return "none"


def test_options_that_differ_are_refused_on_all_ranks(two):
    assert all("the options" in error for error in two.run(refused, max_grad_norm=1.0).values())
    errors = two.run(refused, lower="nothing")
    assert "lower='nothing'" in errors[1]
    assert "rank 1 refuses, and so do all" in errors[0]


def meshes():
    """Return what meshes of this rank give, or their error."""
    line = init_device_mesh("cpu", (2,))
    grid = init_device_mesh("cpu", (1, 2), mesh_dim_names=("stage", "data"))
    said = []
    for mesh in (line, grid["data"], grid["stage"], grid, "data"):
        model = make("mlp")
        opt = optimizer_of(model.parameters(), "sgd")
        try:
            said.append(gradweave.compile(model, loss_fn, opt, mesh=mesh).explain())
        except gradweave.GradweaveError as error:
            said.append(str(error))
    return said


def test_a_mesh_has_one_dimension(two):
    for line, data, stage, grid, text in two.run(meshes).values():
        assert "2 ranks average" in line
        assert "2 ranks average" in data
        assert "average" not in stage
        assert "give a mesh of one dimension" in grid
        assert "give a DeviceMesh" in text


def trains_apart():
    """Return the warnings of compiling without a mesh."""
    _logging._log_once.cache_clear()
    heard = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage()) if record.levelname == "WARNING" else None
    logging.getLogger("gradweave").addHandler(handler)
    try:
        model = make("mlp")
        gradweave.compile(model, loss_fn, optimizer_of(model.parameters(), "sgd"))
    finally:
        logging.getLogger("gradweave").removeHandler(handler)
    return heard


def test_ranks_without_a_mesh_are_told_that_they_train_apart(two):
    heard = two.run(trains_apart)
    (said,) = heard[0]
    assert "give mesh=" in said
    assert heard[1] == []  # the first rank speaks for all


def dies(*, at, lower, policy="auto"):
    """Let the second rank end in a step; return the first one's error, how long it took, and whether weights stayed."""
    rank, model = dist.get_rank(), make("mlp")
    opt = optimizer_of(model.parameters(), "sgd")
    step_of = gradweave.compile(model, loss_fn, opt, mesh=dist.group.WORLD, lower=lower, policy=policy)
    for number in range(at):
        step_of(*batch("mlp", number, rank))
    if rank:
        os._exit(0)
    before = [p.detach().clone() for p in model.parameters()]
    began = time.monotonic()
    try:
        step_of(*batch("mlp", at, rank))
    except gradweave.GradweaveError as error:
        whole = all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
        return type(error).__name__, str(error), time.monotonic() - began, whole
    return "none", "", 0.0, True


@pytest.mark.parametrize(
    ("at", "lower", "policy"),
    [(0, "replay", "auto"), (3, "replay", "auto"), (3, "inductor", "auto"), (3, "replay", "no_barrier")],
)
def test_a_lost_rank_is_an_error_and_leaves_weights_whole(tmp_path, at, lower, policy):
    world = World(tmp_path, 2, 1)
    try:
        world.ask(dies, range(2), at=at, lower=lower, policy=policy)
        kind, message, seconds, whole = world.answers([0])[0]
    finally:
        world.close()
    assert kind == "LostPeerError"
    assert "a rank is lost, or has run out of batches" in message
    assert seconds < 30
    assert whole


def dies_with_messages_under_way():
    """Let the second rank end while updates of the last step still wait for its messages; look at a weight then."""
    model = make("gpt")
    opt = optimizer_of(model.parameters(), "sgd")
    step_of = gradweave.compile(model, loss_fn, opt, mesh=dist.group.WORLD, lower="replay", policy="no_barrier")
    for number in range(4):
        step_of(*batch("gpt", number, dist.get_rank()))
    if dist.get_rank():
        os._exit(0)
    began, errors = time.monotonic(), []
    for look in (lambda: next(model.parameters()).sum(), lambda: step_of(*batch("gpt", 5, 0))):
        try:
            look()
        except gradweave.GradweaveError as error:
            errors.append(type(error).__name__)
    finite = all(bool(p.isfinite().all()) and type(p) is nn.Parameter for p in model.parameters())
    return errors, time.monotonic() - began, finite


def test_a_rank_that_is_lost_between_steps_is_an_error_at_the_latest_in_the_next(tmp_path):
    world = World(tmp_path, 2, 1)
    try:
        world.ask(dies_with_messages_under_way, range(2))
        errors, seconds, finite = world.answers([0])[0]
    finally:
        world.close()
    assert "LostPeerError" in errors
    assert set(errors) == {"LostPeerError"}
    assert seconds < 30
    assert finite


def with_eva(*, way, optimizer, lower="replay"):
    """Train with an optimizer that averages vectors over ranks, too."""
    rank, model = dist.get_rank(), make("mlp")
    opt = getattr(optim, optimizer)(model, lr=0.02, foreach=False)
    if way == "ddp":
        wrapped = DistributedDataParallel(model)
    else:
        step_of = gradweave.compile(model, loss_fn, opt, mesh=dist.group.WORLD, lower=lower)
    for number in range(6):
        x, y = batch("mlp", number, rank)
        if way == "ddp":
            loss_fn(wrapped, x, y).backward()
            opt.step()
            opt.zero_grad()
        else:
            step_of(x, y)
    explained = "" if way == "ddp" else f"{step_of.eager_reason} {step_of.explain()}"
    return [p.detach().clone() for p in model.parameters()], explained


@pytest.mark.parametrize(
    ("optimizer", "lower"), [("Eva", "replay"), ("EvaF", "replay"), ("EvaS", "replay"), ("EvaF", "inductor")]
)
def test_vectors_of_eva_are_averaged_in_the_graph(two, optimizer, lower):
    expected = two.run(with_eva, way="ddp", optimizer=optimizer)
    made = two.run(with_eva, way="ours", optimizer=optimizer, lower=lower)
    tolerance = 0.0 if lower == "replay" else 1e-4
    for rank in range(2):
        assert made[rank][1].startswith("None ")
        assert "1 graph(s)" in made[rank][1]
        for one, other in zip(made[rank][0], expected[rank][0], strict=True):
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_ranks_that_update_by_other_kernels_stay_equal(two):
    """Compiled kernels round otherwise than the optimizer's own."""
    found = two.run(mixed)
    assert all(torch.equal(*pair) for pair in zip(found[0]["weights"], found[1]["weights"], strict=True))
    assert "update outside of their graphs" in found[0]["explain"]
    expected = two.run(branches, way="ddp", used=MIXED)
    for made, wanted in zip(found[0]["weights"], expected[0], strict=True):
        torch.testing.assert_close(made, wanted, rtol=1e-4, atol=1e-5)


MIXED = [[1, 1, 1, 1, 1, 1, 1, 1, 1], [1, 0, 1, 0, 0, 1, 0, 1, 1]]


def mixed():
    """Train by compiled steps a layer that the second rank does not always use."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Branches()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    step_of = gradweave.compile(
        model, lambda model, x, which: model(x, which).square().mean(), opt, mesh=dist.group.WORLD
    )
    for number, which in enumerate(MIXED[rank]):
        step_of(torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * number + rank)), which)
    return {"weights": [p.detach().clone() for p in model.parameters()], "explain": step_of.explain()}


def recorded():
    """Record steps on the first rank only."""
    from contextlib import nullcontext

    rank, model = dist.get_rank(), make("mlp")
    opt = optimizer_of(model.parameters(), "adamw")
    step_of = gradweave.compile(model, loss_fn, opt, mesh=dist.group.WORLD)
    for number in range(8):
        if rank == 0:
            step_of.record((lambda *_: nullcontext()) if number in (2, 3) else None)
        step_of(*batch("mlp", number, rank))
    return [p.detach().clone() for p in model.parameters()]


def test_a_rank_may_record_its_steps(two):
    found = two.run(recorded)
    assert all(torch.equal(*pair) for pair in zip(found[0], found[1], strict=True))


class Experts(nn.Module):
    """A layer that is always used, and one that a rare batch needs."""

    def __init__(self):
        super().__init__()
        self.always, self.rare = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, is_rare):
        x = self.always(x)
        return x + self.rare(x) if is_rare else x


def late(*, way, lower="replay", **options):
    """Train with a layer that the second rank alone uses, for the first time in its fourth step."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Experts()
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)

    def loss_of(model, x, is_rare):
        return model(x, is_rare).square().mean()

    if way == "ddp":
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    else:
        step_of = gradweave.compile(model, loss_of, opt, mesh=dist.group.WORLD, lower=lower, **options)
    try:
        for number in range(8):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * number + rank))
            is_rare = rank == 1 and number in (3, 4, 6)
            if way == "ddp":
                loss_of(wrapped, x, is_rare).backward()
                opt.step()
                opt.zero_grad()
            else:
                step_of(x, is_rare)
    except gradweave.GradweaveError as error:
        return str(error)
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("lower", ["replay", "inductor"])
def test_a_layer_that_one_rank_comes_to_use_late(two, lower):
    expected, made = two.run(late, way="ddp"), two.run(late, way="ours", lower=lower)
    assert all(torch.equal(*pair) for pair in zip(made[0], made[1], strict=True))
    tolerance = 0.0 if lower == "replay" else 1e-4
    for one, other in zip(made[0], expected[0], strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_a_late_layer_that_would_change_the_norm_of_all_is_an_error_on_all_ranks(two):
    errors = two.run(late, way="ours", max_grad_norm=0.1)
    assert all("come to have gradients on some ranks" in error for error in errors.values())


def trains_a_loss(*, way):
    """Train a layer of the loss, which begins differently on each rank."""
    rank, model = dist.get_rank(), make("mlp")
    torch.manual_seed(7 + rank)
    head = nn.Linear(5, 5)
    opt = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)

    def loss_of(model, x, y):
        return F.cross_entropy(head(model(x)), y)

    if way == "ddp":
        whole = DistributedDataParallel(nn.Sequential(model, head))
    else:
        step_of = gradweave.compile(model, loss_of, opt, mesh=dist.group.WORLD, lower="replay")
    for number in range(5):
        x, y = batch("mlp", number, rank)
        if way == "ddp":
            F.cross_entropy(whole(x), y).backward()
            opt.step()
            opt.zero_grad()
        else:
            step_of(x, y)
    return [p.detach().clone() for p in (*model.parameters(), *head.parameters())]


def test_parameters_of_the_loss_are_replicas_too(two):
    expected, made = (two.run(trains_a_loss, way=way) for way in ("ddp", "ours"))
    for rank in range(2):
        assert all(torch.equal(*pair) for pair in zip(made[rank], expected[rank], strict=True))


def departs(*, how):
    """Let the second rank do something by itself; return the errors of both."""
    rank, model = dist.get_rank(), make("conv" if how == "layout" else "mlp")
    kind = "conv" if how == "layout" else "mlp"
    opt = optimizer_of(model.parameters(), "sgd")
    fails = [False]

    def loss_of(model, x, y):
        if fails[0]:
            raise ValueError("on purpose")
        return loss_fn(model, x, y)

    step_of = gradweave.compile(model, loss_of, opt, mesh=dist.group.WORLD, lower="replay")
    errors = []
    for number in range(5):
        if rank == 1 and number == 2 and how == "layout":
            model.to(memory_format=torch.channels_last)
        if rank == 1 and number == 0 and how == "frozen":
            model[0].weight.requires_grad_(False)
        fails[0] = number == 2 and (how == "all fail" or (how == "fails" and rank == 1))
        try:
            step_of(*batch(kind, number, rank))
        except (ValueError, gradweave.GradweaveError) as error:
            errors.append(f"{type(error).__name__}: {error}")
            if "on purpose" not in errors[-1]:
                break
    return errors


@pytest.mark.parametrize("how", ["fails", "layout", "frozen"])
def test_what_one_rank_does_alone_is_an_error_on_both_in_time(tmp_path, how):
    world = World(tmp_path, 2, 1, timeout=timedelta(seconds=4))
    try:
        world.ask(departs, range(2), how=how)
        errors = world.answers([0, 1], 60)
    finally:
        world.close()
    assert errors[0][-1].startswith(("LostPeerError", "ReplicaError"))
    assert errors[1][-1].startswith("ReplicaError")


def test_a_step_that_fails_on_all_ranks_can_be_followed_by_others(two):
    assert all(errors == ["ValueError: on purpose"] for errors in two.run(departs, how="all fail").values())


def looks_up_sparsely():
    model = nn.Embedding(5, 5, sparse=True)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    step_of = gradweave.compile(model, lambda m, x: m(x).square().mean(), opt, mesh=dist.group.WORLD)
    try:
        step_of(torch.tensor([0, 1]))
    except gradweave.GradweaveError as error:
        return str(error)
    return "none"


def test_sparse_gradients_are_refused(two):
    assert all("construct the embedding with sparse=False" in error for error in two.run(looks_up_sparsely).values())


def freezes_between(*, lower):
    """Freeze a layer behind the first micro-batch of a step, whose gradients wait to be averaged."""
    rank, model = dist.get_rank(), make("mlp")
    opt = optimizer_of(model.parameters(), "sgd")
    step_of = gradweave.compile(model, loss_fn, opt, mesh=dist.group.WORLD, lower=lower)
    for number in range(5):
        with step_of.no_update():
            step_of(*batch("mlp", 10 * number, rank))
        if number == 2:
            model[0].requires_grad_(False)
        step_of(*batch("mlp", 10 * number + 1, rank))
    return [p.detach().clone() for p in model.parameters()]


def test_a_layer_that_is_frozen_between_micro_batches(two):
    found = two.run(freezes_between, lower="replay")
    assert all(torch.equal(*pair) for pair in zip(found[0], found[1], strict=True))


def nothing_at_first():
    """Train parameters of which no rank has a gradient in the first steps."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Experts()
    opt = torch.optim.SGD(model.rare.parameters(), lr=0.1)
    step_of = gradweave.compile(
        model, lambda m, x, is_rare: m(x, is_rare).square().mean(), opt, mesh=dist.group.WORLD, lower="replay"
    )
    for number in range(5):
        step_of(torch.randn(3, 4, generator=torch.Generator().manual_seed(number + 9 * rank)), number > 1 and rank == 0)
    return [p.detach().clone() for p in model.parameters()]


def test_a_first_step_without_any_gradient(two):
    found = two.run(nothing_at_first)
    assert all(torch.equal(*pair) for pair in zip(found[0], found[1], strict=True))


def eva_beside_branches():
    """Train with vectors, and a layer that nothing uses, in steps that ranks take in different ways."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Branches()
    opt = optim.EvaF(model, lr=0.02)
    step_of = gradweave.compile(
        model, lambda m, x, which: m(x, which).square().mean(), opt, mesh=dist.group.WORLD, lower="replay"
    )
    for number in range(6):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * number + rank))
        step_of(x, number < 2 or number % 2 == rank)
    return [p.detach().clone() for p in model.parameters()]


def test_eva_beside_a_layer_that_nothing_uses(two):
    found = two.run(eva_beside_branches)
    assert all(torch.equal(*pair) for pair in zip(found[0], found[1], strict=True))
