"""Results of DataParallel on two and four ranks, bit for bit those of DistributedDataParallel.

A function above a test runs on every rank, and returns what its test looks at.
"""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from gradweave._runtime.deferred.pending_parameter import PendingParameter
from gradweave.errors import GradweaveError
from gradweave.parallel.data_parallel import DataParallel
from parallel.data_parallel.loops import (
    LOOPS,
    adds_a_layer,
    adds_without_sync,
    backward,
    finish,
    thaws,
    two_forwards_first,
    two_heads,
)
from parallel.data_parallel.models import batch, loss_of, make, optimizer_of, weights
from parallel.data_parallel.ways import ByHand, leave, wrap

POLICIES = [
    {"policy": "in_order"}, {"policy": "no_barrier"}, {"policy": "reverse_first_k", "k": 2},
    {"policy": "reverse_first_k", "k": "all"}, {"policy": "reverse_first_k"}, {"policy": "auto"},
]  # fmt: skip


def train(
    *, kind="mlp", optimizer="sgd", steps=6, way="ours", clip=None, accumulate=1, schedule=False, look=False, **options
):
    """Train; return everything that is compared with DistributedDataParallel."""
    model = make(kind)
    opt = optimizer_of(model.parameters(), optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
    if way == "ddp":
        wrapped = DistributedDataParallel(model, find_unused_parameters=kind == "tied")
    else:
        wrapped = wrap(model, opt, way, **options)
    rank, seen, losses, norms = dist.get_rank(), [], [], []
    for step in range(steps):
        for part in range(accumulate):
            if part < accumulate - 1:
                with wrapped.no_sync():
                    loss_of(wrapped, kind, 10 * step + part, rank).backward()
            else:
                loss = loss_of(wrapped, kind, 10 * step + part, rank)
                loss.backward()
        if clip:
            norms.append(float(nn.utils.clip_grad_norm_(wrapped.parameters(), clip)))
        opt.step()
        opt.zero_grad()
        if schedule:
            scheduler.step()
        losses.append(float(loss.detach()))
        if look:
            seen.append(weights(model))
    state = [s[key].clone() for s in opt.state.values() for key in s if key != "step"]
    result = {
        "seen": seen, "end": weights(model), "losses": losses, "norms": norms, "state": state,
        "buffers": [b.clone() for b in model.buffers()], "names": list(wrapped.state_dict()),
        "parameter_names": [n for n, _ in wrapped.named_parameters()],
        "explained": wrapped.explain() if way == "ours" else "", "k": wrapped.k if way == "ours" else None,
    }  # fmt: skip
    if way == "ours":
        wrapped.detach()
    dist.barrier()
    return result


def same(one, other):
    for key in ("seen", "losses", "norms", "state"):
        assert len(one[key]) == len(other[key])
        for a, b in zip(one[key], other[key], strict=True):
            assert torch.equal(torch.as_tensor(a), torch.as_tensor(b)), key
    assert torch.equal(one["end"], other["end"])


@pytest.mark.parametrize("options", POLICIES, ids=lambda o: " ".join(map(str, o.values())))
@pytest.mark.parametrize("kind", ["mlp", "conv", "gpt", "tied"])
def test_results_are_those_of_ddp_bit_for_bit(two, kind, options):
    options = {**options, "bucket_bytes": 700}
    ours = two.run(train, kind=kind, optimizer="adamw", steps=8, **options)
    ddp = two.run(train, kind=kind, optimizer="adamw", steps=8, way="ddp")
    for rank in range(2):
        same(ours[rank], ddp[rank])
        assert ours[rank]["names"] == [name.removeprefix("module.") for name in ddp[rank]["names"]]
        assert all(torch.equal(a, b) for a, b in zip(ours[rank]["buffers"], ddp[rank]["buffers"], strict=True))
    assert torch.equal(ours[0]["end"], ours[1]["end"])


BY_HAND = (two_forwards_first, thaws, adds_a_layer, two_heads, adds_without_sync)
"""Loops that DistributedDataParallel does not train, or does not train right."""
HELD = {"policy": "reverse_first_k", "k": 3, "bucket_bytes": 700}


def loop(*, way, body, kind="mlp", optimizer="adamw", steps=5, **options):
    """Train with one of the loops; return the weights, and what each step has returned."""
    model = make(kind)
    opt = optimizer_of(model.parameters(), optimizer)
    wrapped = wrap(model, opt, way, **options)
    notes = [body(model, wrapped, opt, kind, step) for step in range(steps)]
    end = weights(model)
    leave(wrapped)
    return {"end": end, "notes": [note for note in notes if note is not None]}


@pytest.mark.parametrize("options", [{"policy": "in_order"}, {"policy": "no_barrier"}, HELD], ids=lambda o: o["policy"])
@pytest.mark.parametrize("body", LOOPS, ids=lambda f: f.__name__)
def test_loops_of_all_kinds_give_what_ddp_gives(two, body, options):
    ours = two.run(loop, way="ours", body=body, **options)
    ddp = two.run(loop, way="by hand" if body in BY_HAND else "ddp", body=body)
    for rank in range(2):
        assert torch.equal(ours[rank]["end"], ddp[rank]["end"])
        for one, other in zip(ours[rank]["notes"], ddp[rank]["notes"], strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("optimizer", ["sgd", "fused"])
@pytest.mark.parametrize(
    "loop", [{"clip": 0.1}, {"accumulate": 3}, {"schedule": True, "look": True}], ids=lambda o: next(iter(o))
)
def test_clipping_accumulation_and_schedules(two, loop, optimizer):
    ours = two.run(train, optimizer=optimizer, **HELD, **loop)
    ddp = two.run(train, optimizer=optimizer, way="ddp", **loop)
    for rank in range(2):
        same(ours[rank], ddp[rank])


@pytest.mark.parametrize("policy", ["no_barrier", "auto"])
def test_four_ranks_stay_together(four, policy):
    ours = four.run(train, kind="gpt", steps=8, policy=policy)
    ddp = four.run(train, kind="gpt", steps=8, way="ddp")
    for rank in range(4):
        assert torch.equal(ours[rank]["end"], ours[0]["end"])
        torch.testing.assert_close(ours[rank]["end"], ddp[rank]["end"], rtol=1e-5, atol=1e-6)


def low_precision(*, way, **options):
    """Train with gradients that travel as bfloat16; return the weights."""
    model = make("mlp")
    opt = optimizer_of(model.parameters(), "sgd")
    if way == "by hand":
        wrapped = ByHand(model, torch.bfloat16)
    else:
        wrapped = DataParallel(model, opt, reduce_dtype=torch.bfloat16, **options)
    for step in range(4):
        backward(wrapped, "mlp", step)
        finish(opt)
    end = weights(model)
    leave(wrapped)
    return end


def autocast(*, way, **options):
    model = make("mlp")
    opt = optimizer_of(model.parameters(), "sgd")
    wrapped = wrap(model, opt, way, **options)
    for step in range(4):
        x, y = batch("mlp", step, dist.get_rank())
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(wrapped(x).float(), y)
        loss.backward()
        finish(opt)
    end = weights(model)
    leave(wrapped)
    return end


class Choosing(nn.Module):
    """Each rank leaves another layer out, and both leave out a third."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))
        self.last = nn.Linear(12, 5)

    def forward(self, x):
        for number, part in enumerate(self.parts):
            if number not in (dist.get_rank(), 2):
                x = torch.tanh(part(x))
        return self.last(x)


def leaves_out(*, way, **options):
    torch.manual_seed(0)
    model = Choosing()
    opt = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    if way == "ddp":
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    else:
        wrapped = DataParallel(model, opt, **options)
    for step in range(4):
        backward(wrapped, "mlp", step)
        finish(opt)
    end = weights(model)
    leave(wrapped)
    return end


@pytest.mark.parametrize(("scenario", "other"), [(low_precision, "by hand"), (autocast, "ddp"), (leaves_out, "ddp")])
def test_precisions_and_layers_left_out(two, scenario, other):
    ours, expected = two.run(scenario, way="ours", **HELD), two.run(scenario, way=other)
    assert all(torch.equal(ours[rank], expected[rank]) for rank in range(2))


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.first, self.last = nn.Linear(12, 12), nn.Linear(12, 5)
        self.middle = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12))

    def forward(self, x):
        return self.last(checkpoint(self.middle, self.first(x), use_reentrant=self.reentrant))


def checkpoints(*, way, reentrant, **options):
    torch.manual_seed(0)
    model = Checkpointed(reentrant)
    opt = optimizer_of(model.parameters(), "adamw")
    wrapped = wrap(model, opt, way, **options)
    for step in range(4):
        backward(wrapped, "mlp", step)
        finish(opt)
    end = weights(model)
    leave(wrapped)
    return end


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(two, reentrant):
    options = {"policy": "reverse_first_k", "k": "all"}
    ours = two.run(checkpoints, way="ours", reentrant=reentrant, **options)
    ddp = two.run(checkpoints, way="ddp", reentrant=reentrant)
    assert all(torch.equal(ours[rank], ddp[rank]) for rank in range(2))


@pytest.mark.parametrize("policy", [{"policy": "in_order"}, {"policy": "no_barrier"}, HELD], ids=lambda o: o["policy"])
def test_checkpoints_inside_of_a_backward(two, policy):
    ours = two.run(checkpoints, way="ours", reentrant=True, **{**policy, "bucket_bytes": 1})
    ddp = two.run(checkpoints, way="ddp", reentrant=True)
    assert all(torch.equal(ours[rank], ddp[rank]) for rank in range(2))


def orders(*, k):
    """Return the order in which gradients come, and which weights are pending as each layer begins."""
    model = make("mlp")
    opt = optimizer_of(model.parameters(), "sgd")
    linears = [module for module in model if isinstance(module, nn.Linear)]
    came, pending = [], []
    for number, module in enumerate(linears):
        module.weight.register_post_accumulate_grad_hook(lambda _, number=number: came.append(number))
        module.register_forward_pre_hook(
            lambda *_: pending.append([isinstance(m.weight, PendingParameter) for m in linears])
        )
    wrapped = DataParallel(model, opt, policy="reverse_first_k", k=k, bucket_bytes=1)
    for step in range(4):
        came.clear()
        pending.clear()
        backward(wrapped, "mlp", step)
        finish(opt)
    leave(wrapped)
    return {"came": came, "pending": pending}


@pytest.mark.parametrize(("k", "expected"), [(0, [4, 3, 2, 1, 0]), (2, [4, 3, 2, 0, 1]), (5, [0, 1, 2, 3, 4])])
def test_the_first_layers_come_last_and_updates_wait_for_their_use(two, k, expected):
    seen = two.run(orders, k=k)[0]
    assert seen["came"] == expected
    assert not any(seen["pending"][at][number] for at in range(5) for number in range(at))


def holds(*, byte_budget):
    """Return the most bytes that held-back gradients have kept alive, and the weights at the end."""
    model = make("mlp")
    opt = optimizer_of(model.parameters(), "sgd")
    wrapped = DataParallel(model, opt, policy="reverse_first_k", k="all", byte_budget=byte_budget)
    for step in range(4):
        backward(wrapped, "mlp", step)
        finish(opt)
    end, held = weights(model), wrapped.most_bytes_held
    leave(wrapped)
    return {"end": end, "held": held}


def test_a_byte_budget_is_kept(two):
    free, bound = two.run(holds, byte_budget=None)[0], two.run(holds, byte_budget=600)[0]
    assert free["held"] > 600 >= bound["held"] > 0
    assert torch.equal(free["end"], bound["end"])


def auto(*, steps=40):
    """Train over a link that costs next to nothing; return the findings."""
    model = make("mlp")
    opt = optimizer_of(model.parameters(), "sgd")
    wrapped = DataParallel(model, opt)
    for step in range(steps):
        backward(wrapped, "mlp", step % 5)
        finish(opt)
    result = {"explained": wrapped.explain(), "end": weights(model)}
    leave(wrapped)
    return result


def test_where_it_does_not_pay_steps_stay_in_stock_order(two):
    explained = two.run(auto)[0]["explained"]
    assert "communication is" in explained
    assert "measured" in explained or "in stock order, with a barrier" in explained


def states(*, policy, steps, frozen_at=None):
    """Train; return the state in the forward of each step, and after detaching."""
    model = make("mlp")
    opt = optimizer_of(model.parameters(), "sgd")
    wrapped = DataParallel(model, opt, policy=policy)
    seen = []
    for step in range(steps):
        if step == frozen_at:
            model[0].requires_grad_(False)
        loss = loss_of(wrapped, "mlp", step, dist.get_rank())
        seen.append(wrapped._state.name)
        loss.backward()
        finish(opt)
    leave(wrapped)
    return seen, wrapped._state.name


def test_a_given_arrangement_is_settled_after_one_step_of_learning(two):
    learnt = ["LEARNING", "SETTLED", "SETTLED"]
    for answer in two.run(states, policy="no_barrier", steps=3).values():
        assert answer == (learnt, "DETACHED")
    for answer in two.run(states, policy="no_barrier", steps=6, frozen_at=3).values():
        assert answer == (learnt + learnt, "DETACHED")


@pytest.mark.parametrize("policy", ["auto", "reverse_first_k"])
def test_an_arrangement_that_is_searched_for_is_measured_tried_and_settled(two, policy):
    first, second = two.run(states, policy=policy, steps=32).values()
    assert first == second
    seen, after = first
    runs = [state for state, previous in zip(seen, [None, *seen], strict=False) if state != previous]
    assert runs in (["LEARNING", "MEASURING", "SETTLED"], ["LEARNING", "MEASURING", "TRYING", "SETTLED"])
    assert policy == "auto" or "TRYING" not in runs
    assert seen.count("LEARNING") == 1
    assert after == "DETACHED"


def test_an_arrangement_that_could_not_be_made_is_made_in_the_next_forward(monkeypatch):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    opt = optimizer_of(model.parameters(), "sgd")
    wrapped = DataParallel(model, opt, policy="no_barrier")
    wrapped(torch.ones(2, 3)).sum().backward()
    finish(opt)

    def fail(*_):
        raise MemoryError("as the test wants it")

    with monkeypatch.context() as patched:
        patched.setattr("gradweave.parallel.data_parallel.api.AveragedUpdates", fail)
        with pytest.raises(MemoryError):
            wrapped(torch.ones(2, 3))
    assert "barrier before the update" in wrapped.explain()
    for _ in range(2):
        wrapped(torch.ones(2, 3)).sum().backward()
        finish(opt)
    assert wrapped.explain() == "1 rank(s), 1 message(s) a step, no barrier between steps"
    assert isinstance(model[0].weight, PendingParameter)
    wrapped.detach()


def resumes(*, at, steps, **options):
    """Take a checkpoint in mid-run; return the weights of the run, and of a new wrapper that goes on from it."""
    model = make("conv")
    opt = optimizer_of(model.parameters(), "adamw")
    wrapped = DataParallel(model, opt, **options)
    for step in range(at):
        backward(wrapped, "conv", step)
        finish(opt)
    saved = copy.deepcopy((wrapped.state_dict(), opt.state_dict()))
    for step in range(at, steps):
        backward(wrapped, "conv", step)
        finish(opt)
    end = weights(model)
    leave(wrapped)
    fresh = make("conv")
    for p in fresh.parameters():
        p.data.add_(1.0)
    other = optimizer_of(fresh.parameters(), "adamw")
    again = DataParallel(fresh, other, **options)
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    for step in range(at, steps):
        backward(again, "conv", step)
        finish(other)
    result = weights(fresh)
    leave(again)
    return {"end": end, "resumed": result}


def test_a_checkpoint_in_mid_run_goes_on_bit_for_bit(two):
    for result in two.run(resumes, at=3, steps=7, **HELD).values():
        assert torch.equal(result["end"], result["resumed"])


def nests():
    model = make("conv")
    parent = nn.ModuleDict({"inner": DataParallel(model, optimizer_of(model.parameters(), "sgd"))})
    saved = {name: value + 1 for name, value in parent.state_dict().items()}
    parent.load_state_dict(saved)
    right = all(torch.equal(value, saved[f"inner.{name}"]) for name, value in model.state_dict().items())
    parent["inner"].detach()
    return right and "inner.0.weight" in saved


def test_a_wrapper_inside_of_a_module_loads_what_it_has_saved(two):
    assert all(two.run(nests).values())


def copies():
    model = make("mlp")
    opt = optimizer_of(model.parameters(), "sgd")
    wrapped = DataParallel(model, opt, policy="no_barrier")
    for step in range(3):
        backward(wrapped, "mlp", step)
        finish(opt)
    buffer = io.BytesIO()
    torch.save(wrapped, buffer)
    buffer.seek(0)
    made = [copy.deepcopy(wrapped), torch.load(buffer, weights_only=False)]
    averaged = torch.optim.swa_utils.AveragedModel(wrapped)
    averaged.update_parameters(wrapped)
    same = all(torch.equal(weights(one), weights(model)) for one in (*made, averaged.module))
    loss_of(made[0], "mlp", 0, 0).backward()
    trains = made[0][0].weight.grad is not None
    leave(wrapped)
    return type(made[1]).__name__, same, trains


def test_copies_of_the_wrapper_are_plain_models(two):
    for kind, same_weights, trains in two.run(copies).values():
        assert (kind, same_weights, trains) == ("Sequential", True, True)


def fails(*, when):
    """Let a backward fail before or after the first message; return its error, and that of the next forward."""
    model = make("mlp")
    opt = optimizer_of(model.parameters(), "sgd")
    wrapped = DataParallel(model, opt, policy="no_barrier", bucket_bytes=1)
    for step in range(2):
        backward(wrapped, "mlp", step)
        finish(opt)
    x, y = batch("mlp", 2, dist.get_rank())
    loss = F.cross_entropy(wrapped(x), y)

    def fail(_):
        raise ValueError("as the test wants it")

    hook = model[8 if when == "early" else 0].weight.register_hook(fail)
    said = []
    try:
        loss.backward()
    except ValueError as error:
        said.append(str(error))
    hook.remove()
    opt.zero_grad()
    try:
        backward(wrapped, "mlp", 2)
        finish(opt)
    except GradweaveError as error:
        said.append(str(error))
    wrapped.detach()
    dist.barrier()
    return {"said": said}


@pytest.mark.parametrize("when", ["early", "late"])
def test_a_backward_that_fails_cannot_go_on(two, when):
    for answer in two.run(fails, when=when).values():
        assert answer["said"][0] == "as the test wants it"
        assert "start again from a checkpoint" in answer["said"][1]


def differs():
    """Wrap a model of another size on each rank; return the error."""
    model = nn.Linear(3, 2 + dist.get_rank())
    try:
        DataParallel(model, optimizer_of(model.parameters(), "sgd"))
    except GradweaveError as error:
        return str(error)
    return ""


def test_models_that_differ_are_refused(two):
    answers = two.run(differs)
    assert all("give DataParallel the same on all ranks" in answer for answer in answers.values())


def options_differ():
    model = make("mlp")
    try:
        DataParallel(model, optimizer_of(model.parameters(), "sgd"), bucket_bytes=100 + dist.get_rank())
    except GradweaveError as error:
        return str(error)
    return ""


def test_options_that_differ_are_refused(two):
    answers = two.run(options_differ)
    assert all("the options" in answer for answer in answers.values())


def in_parts():
    """Train in two groups of two ranks; return the weights."""
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    rank = dist.get_rank()
    model = make("conv")
    opt = optimizer_of(model.parameters(), "sgd")
    wrapped = DataParallel(model, opt, policy="no_barrier", process_group=groups[rank // 2])
    dist.new_group()
    for step in range(4):
        backward(wrapped, "conv", step)
        finish(opt)
    end = weights(model)
    wrapped.detach()
    dist.barrier()
    return end


def test_groups_that_are_a_part_of_all_ranks(four):
    ends = four.run(in_parts)
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[2], ends[3])
    assert not torch.equal(ends[0], ends[2])
