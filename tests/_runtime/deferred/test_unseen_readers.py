"""Who reads a weight without asking Python finds it updated: threads, other processes, C++, aliases, compilers."""

import copy
import itertools
import logging
import multiprocessing
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

from fusion.loops import adamw, announce_again, assert_same, batches, loss_of, make_net
from gradweave._runtime import buckets
from gradweave._runtime.ab_trial import RULES
from gradweave.errors import GradweaveError
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


def test_threads_that_evaluate_behind_step_see_whole_updates():
    with ThreadPoolExecutor(4) as pool:

        def evaluate(i, model, optimizer, x):
            with torch.no_grad():
                return [
                    out.tolist() for out in pool.map(lambda scale: nn.Module.__call__(model, x * scale), (1, 2, 3, 4))
                ]

        for _ in range(3):
            same(evaluate, steps=20)


def test_threads_that_read_single_weights_see_whole_updates():
    with ThreadPoolExecutor(4) as pool:

        def read(i, model, optimizer, x):
            jobs = [pool.submit(lambda p=p: float(p.detach().sum())) for p in model.parameters() for _ in range(3)]
            jobs += [pool.submit(lambda p=p: float(p.grad.sum())) for p in model.parameters()]
            jobs += [pool.submit(lambda p=p: float(optimizer.state[p]["exp_avg"].sum())) for p in model.parameters()]
            return [job.result() for job in jobs]

        for _ in range(3):
            same(read, steps=20)


class _Looks(optim.Optimizer):
    """Looks at its parameters in every way while it updates them."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["before"] = p.detach().clone()
                    p.add_(p.grad, alpha=-group["lr"])


@pytest.mark.parametrize("kind", [optim.AdamW, _Looks])
def test_another_threads_look_does_not_make_it_update(kind):
    model = make_net()
    optimizer = kind(model.parameters())
    updated_in, looked_in = [], []

    @contextmanager
    def note(_):
        updated_in.append((threading.current_thread(), torch.get_num_threads()))
        yield

    def look():
        looked_in.append(threading.current_thread())
        model.scale.sum()

    with fuse(model, optimizer, "forward") as fusion:
        fusion.record(note)
        for x, y in batches(3):
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
        updated_in.clear()
        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        thread.join(100)
        assert not thread.is_alive()
        assert type(model.scale) is nn.Parameter
    (updated_by, threads_of_torch), *_ = updated_in
    assert updated_by not in (*looked_in, threading.current_thread())
    assert threads_of_torch == torch.get_num_threads()


def _sum_of(model, queue):
    torch.set_num_threads(1)
    queue.put(float(sum(p.detach().sum() for p in model.parameters())))


@pytest.mark.parametrize("mode", ["forward", "backward"])
@pytest.mark.parametrize("shared", [False, True])
def test_a_forked_process_reads_updated_weights_and_changes_none(mode, shared):
    context = multiprocessing.get_context("fork")

    def fork(i, model, optimizer, x):
        if i != 5:
            return None
        queue = context.Queue()
        process = context.Process(target=_sum_of, args=(model, queue))
        process.start()
        try:
            return queue.get(timeout=100)
        finally:
            process.join(timeout=100)

    def model():
        made = make_net()
        return made.share_memory() if shared else made

    expected, wanted = train(None, fork, model=model())
    trained, got = train(mode, fork, model=model())
    assert got == wanted
    assert_same(trained, expected)


def test_weights_in_shared_memory_are_never_pending():
    waiting = []
    train("forward", lambda i, model, *_: waiting.append(pending(model)), model=make_net().share_memory())
    assert waiting == [[]] * 8
    waiting = []
    train("forward", lambda i, model, *_: waiting.append(bool(pending(model))))
    assert any(waiting)


ALIASES = {
    "a view of a weight": lambda model: [model.twice.weight.data[0]],
    "detached weights": lambda model: [p.detach() for p in model.parameters()],
    "a state dict": lambda model: list(model.state_dict().values()),
    "an array": lambda model: [torch.from_numpy(model.head.weight.detach().numpy())],
    "a storage": lambda model: [torch.empty(0).set_(model.head.weight.untyped_storage())],
}


@pytest.mark.parametrize("alias", ALIASES)
def test_what_shares_a_weights_memory_is_up_to_date(alias):
    held = []

    def look(i, model, *_):
        held[:] = ALIASES[alias](model) if i == 3 else held if i > 3 else []
        return [float(tensor.sum()) for tensor in held]

    same(look)


def test_weights_that_are_parts_of_one_buffer():
    def flat_model():
        model = make_net()
        flat = torch.cat([p.detach().flatten() for p in model.parameters()])
        for p, part in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True):
            p.data = part.view(p.shape)
        return model, flat

    def run(mode):
        model, flat = flat_model()
        return train(mode, lambda *_: float(flat.sum()), model=model)

    (expected, wanted), (trained, got) = run(None), run("forward")
    assert got == wanted
    assert_same(trained, expected)


@pytest.mark.parametrize("mode", ["forward", "backward", "auto"])
def test_a_traced_module(mode):
    steps = LONG if mode == "auto" else 8

    def run(mode):
        model = make_net()
        optimizer = adamw(model)
        fusion = fuse(model, optimizer, mode) if mode else None
        traced = torch.jit.trace(model, next(batches(1))[0])
        losses = []
        for x, y in batches(steps):
            optimizer.zero_grad()
            loss = loss_of(traced, x, y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if fusion:
            fusion.detach()
        return (model, optimizer), losses

    (expected, wanted), (trained, got) = run(None), run(mode)
    assert got == wanted
    assert_same(trained, expected)


@pytest.mark.parametrize("what", ["the model", "a part of it", "a function of its weights"])
def test_what_is_traced_in_mid_training_has_no_update_in_it(what):
    """And sees the weights from then on, without a word to Python."""
    made = []

    def trace(i, model, optimizer, x):
        ones = torch.ones(2, 8)
        traced = {
            "the model": lambda: torch.jit.trace(model, x),
            "a part of it": lambda: torch.jit.trace(model.twice, ones, check_trace=False),  # of lines of code too
            "a function of its weights": lambda: torch.jit.trace(lambda x: x @ model.twice.weight.data, ones),
        }
        if i == 4:
            made[:] = [traced[what]()]
            assert not any(node.kind().endswith("_") for node in made[0].inlined_graph.nodes())
        if i < 4 or (what == "a function of its weights" and i > 4):  # which have become constants
            return None
        with torch.no_grad():
            return made[0](x if what == "the model" else ones).tolist()

    same(trace)


@pytest.mark.parametrize("of", ["the model", "a copy"])
def test_scripting_a_fused_model_is_refused_with_the_remedy(of):
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    with fuse(model, adamw(model), "forward"), pytest.raises(GradweaveError, match="detach"):
        torch.jit.script(model if of == "the model" else copy.deepcopy(model))
    torch.jit.script(model)


@pytest.mark.parametrize("mode", ["forward", "backward", "auto"])
@pytest.mark.parametrize("how", ["torch.compile", "in place"])
def test_a_model_that_is_compiled_after_fuse(mode, how, caplog):
    steps = LONG if mode == "auto" else 8

    def run(mode):
        torch._dynamo.reset()
        model = make_net()
        optimizer = adamw(model)
        fusion = fuse(model, optimizer, mode) if mode else None
        called = model
        if how == "in place":
            model.compile(backend="eager")
        else:
            called = torch.compile(model, backend="eager")
        for x, y in batches(steps):
            optimizer.zero_grad()
            loss_of(called, x, y).backward()
            optimizer.step()
        explained = fusion.explain() if fusion else ""
        if fusion:
            fusion.detach()
        return (model, optimizer), explained

    announce_again()
    with caplog.at_level(logging.WARNING, logger="gradweave"):
        trained, explained = run(mode)
    assert_same(trained, run(None)[0])
    if mode != "backward":
        assert "model is compiled" in explained
        assert len([r for r in caplog.records if "in stock order" in r.getMessage()]) == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo's own
@pytest.mark.parametrize("how", ["torch.compile", "torch.compile, full graph", "in place"])
@pytest.mark.parametrize("at", [0, 4])
def test_a_part_that_is_compiled_in_mid_training_finds_nothing_pending(monkeypatch, how, at):
    monkeypatch.setitem(buckets.CPU_BUCKET_BYTES, "forward", 64)

    def run(mode):
        torch._dynamo.reset()
        model = make_net()
        optimizer = adamw(model)
        fusion = fuse(model, optimizer, mode) if mode else None
        called = {}
        for i, (x, y) in enumerate(batches(9)):
            if i == at and how == "in place":
                model.twice.compile(backend="eager")
            elif i == at:
                called["twice"] = torch.compile(model.twice, backend="eager", fullgraph="full" in how)
            optimizer.zero_grad()
            hidden = model.norm(torch.relu(model.inner(x)))
            twice = called.get("twice", model.twice)
            F.cross_entropy(model.head(torch.tanh(twice(hidden)) * model.scale), y).backward()
            optimizer.step()
        explained = fusion.explain() if fusion else ""
        if fusion:
            fusion.detach()
        return (model, optimizer), explained

    trained, explained = run("forward")
    assert_same(trained, run(None)[0])
    assert "updates at step(), since the model is compiled by now" in explained


def test_a_step_that_is_compiled():
    def run(mode):
        torch._dynamo.reset()
        model = make_net()
        optimizer = adamw(model)
        fusion = fuse(model, optimizer, mode) if mode else None
        for x, y in batches(6):
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            torch.compile(optimizer.step, backend="eager")()
        if fusion:
            fusion.detach()
        return model, optimizer

    expected = run(None)
    assert_same(run("forward"), expected)
    assert_same(run("auto"), expected)
    with pytest.raises(GradweaveError, match="a compiled optimizer"):
        run("backward")


def test_a_model_compiled_before_keeps_its_updates_pending(caplog):
    model = torch.compile(make_net(), backend="eager")
    with caplog.at_level(logging.WARNING, logger="gradweave"):
        optimizer = adamw(model)
        with fuse(model, optimizer, "forward") as fusion:
            for x, y in batches(4):
                optimizer.zero_grad()
                loss_of(model, x, y).backward()
                optimizer.step()
            assert pending(model)
            assert "updated at their first use" in fusion.explain()


@pytest.mark.parametrize("where", ["a part", "the whole"])
@pytest.mark.parametrize("mode", ["forward", "backward", "auto"])
def test_scripted_and_in_place_compiled_modules_train_in_stock_order(mode, where):
    def run(mode):
        torch.manual_seed(0)
        inner = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
        model = nn.Sequential(nn.Linear(6, 8), inner, nn.Linear(8, 3))
        if where == "the whole":
            model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
            model.compile(backend="eager")
        return train(mode, model=model, steps=5)[0]

    run(None)  # a script's first runs differ from later ones by rounding
    (model, optimizer), (expected, expected_optimizer) = run(mode), run(None)
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(p, q)
        assert torch.equal(optimizer.state[p]["exp_avg"], expected_optimizer.state[q]["exp_avg"])


def test_a_parameter_made_from_the_class_of_a_pending_one():
    def make_another(i, model, *_):
        made = type(model.head.weight)(torch.ones(2, 2))
        assert type(made) is nn.Parameter
        return made.sum().item()

    same(make_another)


def test_a_parameter_made_from_a_pending_one_shares_its_memory():
    def tie(i, model, optimizer, x):
        tied = nn.Parameter(model.head.weight)
        assert type(tied) is nn.Parameter
        assert tied.is_leaf
        assert tied.data_ptr() == model.head.weight.data_ptr()
        assert type(model.head.weight.detach()) is torch.Tensor
        return tied.tolist()

    same(tie)


def test_a_pending_weight_that_is_swapped_for_another():
    def swap(i, model, optimizer, x):
        other = nn.Parameter(torch.ones_like(model.inner.weight))
        if i == 4:
            torch.utils.swap_tensors(model.inner.weight, other)
        return other.detach().tolist()

    same(swap)


def test_a_graph_from_before_the_step_is_stale_as_in_stock():
    def run(mode):
        model = make_net()
        optimizer = adamw(model)
        fusion = fuse(model, optimizer, mode) if mode else None
        for x, y in batches(4):
            old = loss_of(model, x, y)
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            old.backward()
        if fusion:
            fusion.detach()

    run(None)
    run("forward")


def test_a_state_that_is_replaced_while_updates_are_pending():
    def reset(i, model, optimizer, x):
        if i == 4:
            optimizer.state = defaultdict(dict)

    same(reset)
    same(reset, mode="auto", steps=LONG)


class Scaled(optim.Optimizer):
    """Reads numbers from an attribute, from its class, and from a list in its group."""

    of_all = 1.0

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "factors": [1.0, 1.0]})
        self.scale = 1.0

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] * self.scale * self.of_all * group["factors"][0])


@pytest.mark.parametrize("where", ["attribute", "class", "list"])
def test_numbers_that_change_behind_step_are_for_the_next(where, monkeypatch):
    monkeypatch.setattr(Scaled, "of_all", 1.0)

    def change(i, model, optimizer, x):
        if where == "attribute":
            optimizer.scale = 1 / (2 + i)
        elif where == "class":
            Scaled.of_all = 1.0 if i == 7 else 1 / (2 + i)
        else:
            optimizer.param_groups[0]["factors"][0] = 1 / (2 + i)

    same(change, make=lambda model: Scaled(model.parameters()))


class Checked(optim.Optimizer):
    """Raises before it has updated anything, as a check for bad numbers or a full disk would."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        self.bad = False

    @torch.no_grad()
    def step(self, closure=None):
        if self.bad:
            raise ArithmeticError("skip this step")
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"])


@pytest.mark.parametrize("after", ["zero_grad", "step again", "read the groups"])
def test_a_step_that_raises_has_not_happened(after):
    def run(mode):
        model = make_net()
        optimizer = Checked(model.parameters())
        fusion = fuse(model, optimizer, mode) if mode else None
        seen = []
        for i, (x, y) in enumerate(batches(8)):
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.bad = i in (4, 5)
            try:
                optimizer.step()
            except ArithmeticError:
                optimizer.bad = False
                if after == "step again":
                    optimizer.step()
                elif after == "read the groups":
                    seen.append(len(copy.deepcopy(optimizer).param_groups[0]["params"]))
            seen.append([len(group["params"]) for group in optimizer.param_groups])
        if fusion:
            fusion.detach()
        return (model, optimizer), seen

    (expected, wanted), (trained, got) = run(None), run("forward")
    assert got == wanted
    assert_same(trained, expected)


class Torn(optim.Optimizer):
    """Fails after it has updated some parameters."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        self.fails_at = None

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    if self.fails_at is not None and p.shape == self.fails_at:
                        raise RuntimeError("out of luck")
                    p.add_(p.grad, alpha=-group["lr"])


def test_an_update_that_fails_halfway_is_never_done_twice():
    model = make_net()
    optimizer = Torn(model.parameters())
    fusion = fuse(model, optimizer, "forward")
    for x, y in batches(2):
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        if pending(model):
            fusion.flush()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
    assert pending(model)

    # The numbers that a late update reads are those of its step; its code is what it is.
    def fails(self, closure=None):
        self.param_groups[0]["params"][0].add_(1.0)
        raise RuntimeError("out of luck")

    fusion._engine._updates.pending._stepper._step = fails
    with pytest.raises(RuntimeError, match="out of luck"), torch.no_grad():
        model.inner.weight.sum()
    fusion._engine._updates.pending._stepper._step = Torn.step
    fusion.detach()
    first = next(iter(before))
    for name, p in model.named_parameters():
        once = before[name] + (1.0 if name == first else -0.1 * gradients[name])
        left = before[name]
        assert torch.allclose(p, once) or torch.allclose(p, left), name
    assert torch.equal(model.scale, before["scale"] + 1.0)


@pytest.mark.parametrize("who", ["the thread that trains", "another"])
def test_an_update_that_fails_before_it_begins_is_still_pending(who):
    def look(model):
        if who == "another":
            with ThreadPoolExecutor(1) as pool:
                return pool.submit(model.inner.weight.sum).result()
        return model.inner.weight.sum()

    def run(mode):
        model = make_net()
        optimizer = Torn(model.parameters())
        fusion = fuse(model, optimizer, mode) if mode else None
        for x, y in batches(4):
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
        if fusion:
            step = fusion._engine._updates.pending._stepper._step

            def interrupted(self, closure=None):
                raise KeyboardInterrupt

            fusion._engine._updates.pending._stepper._step = interrupted
            for _ in range(2):
                with pytest.raises(KeyboardInterrupt):
                    look(model)
            fusion._engine._updates.pending._stepper._step = step
            assert model.inner.weight.grad is not None
            fusion.detach()
        return model, optimizer

    assert_same(run("forward"), run(None))


def test_dispatch_modes_do_not_see_updates():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Counting.seen += "add_" in str(func) or "lerp" in str(func)
            return func(*args, **(kwargs or {}))

    def evaluate(i, model, optimizer, x):
        with Counting(), torch.no_grad():
            return model(x).tolist()

    same(evaluate)
    assert Counting.seen == 0


def test_a_step_inside_of_a_mode_is_seen_by_it():
    """As by the one that keeps what a graph has saved, when it is written to."""

    def run(mode):
        model = make_net()
        optimizer = optim.SGD(model.parameters(), 0.1)
        fusion = fuse(model, optimizer, mode) if mode else None
        for x, y in batches(6):
            with torch.autograd.graph.allow_mutation_on_saved_tensors():
                before, later = loss_of(model, x, y), loss_of(model, 2 * x, y)
                for loss in (before, later):
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    assert not pending(model)
        if fusion:
            fusion.detach()
        return model, optimizer

    assert_same(run("forward"), run(None))


def test_exporting_a_model():
    def export(i, model, optimizer, x):
        if i != 5:
            return None
        return torch.export.export(model, (x,), strict=False).module()(x).tolist()

    same(export)


HELD_STATES = {
    "a tensor": lambda optimizer, p: optimizer.state[p]["exp_avg"],
    "a view": lambda optimizer, p: optimizer.state[p]["exp_avg"].view(-1),
    "the dictionary": lambda optimizer, p: optimizer.state[p],
    "a state dict": lambda optimizer, p: optimizer.state_dict()["state"][0],
}


@pytest.mark.parametrize("held", HELD_STATES)
def test_state_that_the_loop_holds_is_up_to_date(held):
    kept = []

    def look(i, model, optimizer, x):
        kept[:] = [HELD_STATES[held](optimizer, model.scale)] if i == 3 else kept if i > 3 else []
        found = [value["exp_avg"] if isinstance(value, dict) else value for value in kept]
        read = [float(tensor.sum()) for tensor in found]
        for tensor in found:
            tensor.mul_(0.5)
        return read

    same(look)


def test_weights_and_gradients_made_from_arrays():
    def run(mode):
        model = make_net()
        arrays = [p.detach().numpy().copy() for p in model.parameters()]
        for p, array in zip(model.parameters(), arrays, strict=True):
            p.data = torch.from_numpy(array)
            p.grad = torch.from_numpy(array * 0)
        optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        fusion = fuse(model, optimizer, mode) if mode else None
        seen = []
        for x, y in batches(6):
            loss_of(model, x, y).backward()
            optimizer.step()
            for p in model.parameters():
                p.grad.numpy()[...] = 0
            seen.append([float(array.sum()) for array in arrays])
        if fusion:
            fusion.detach()
        return (model, optimizer), seen

    (expected, wanted), (trained, got) = run(None), run("forward")
    assert got == wanted
    assert_same(trained, expected)


def test_a_storage_that_is_held_is_up_to_date():
    held = []

    def look(i, model, *_):
        held[:] = [model.head.weight.untyped_storage()] if i == 3 else held if i > 3 else []
        return [sum(storage) for storage in held]

    same(look)


class OwnRates(optim.Optimizer):
    """Reads a factor that parameters have as an attribute."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] * getattr(p, "factor", 1.0))


def test_attributes_of_parameters_that_change_behind_step_are_for_the_next():
    def change(i, model, *_):
        for p in model.parameters():
            p.factor = 1 / (2 + i)

    def make(model):
        for p in model.parameters():
            p.factor = 1.0
        return OwnRates(model.parameters())

    same(change, make=make)


class Multiplies(optim.Optimizer):
    """Multiplies matrices in its step, which autocast would cast, and makes tensors, which a device would move."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    grad = p.grad @ p.grad.mT @ p.grad if p.dim() == 2 else p.grad
                    p.sub_(grad * torch.full((1,), group["lr"]))


def test_a_step_inside_of_autocast_and_a_read_where_tensors_are_made_elsewhere():
    def run(mode):
        model = make_net()
        optimizer = Multiplies(model.parameters())
        fusion = fuse(model, optimizer, mode) if mode else None
        for i, (x, y) in enumerate(batches(8)):
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            with torch.autocast("cpu", torch.bfloat16, enabled=i % 2 == 0):
                optimizer.step()
            if i % 2:
                with torch.device("meta"):
                    copy.deepcopy(model)
        if fusion:
            fusion.detach()
        return model, optimizer

    assert_same(run("forward"), run(None))


class KeepsWithoutReading(torch.autograd.Function):
    """Saves a weight that its forward does not read."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        (weight,) = ctx.saved_tensors
        return grad + weight.sum(), torch.ones_like(weight)


def test_a_weight_that_a_graph_keeps_unread():
    def run(mode):
        model = make_net()
        optimizer = adamw(model)
        fusion = fuse(model, optimizer, mode) if mode else None
        for x, y in batches(6):
            optimizer.zero_grad()
            hidden = KeepsWithoutReading.apply(model.inner(x), model.scale)
            F.cross_entropy(model.head(model.twice(hidden)), y).backward()
            optimizer.step()
        if fusion:
            fusion.detach()
        return model, optimizer

    assert_same(run("forward"), run(None))


def test_the_state_of_an_optimizer_is_a_dictionary_like_any_other():
    def look(i, model, optimizer, x):
        state = optimizer.state
        return [len(copy.copy(state)), len(state | {}), len({} | state), len(list(reversed(state))), state != {}]

    same(look)


class Attending(nn.Module):
    """A Transformer's encoder, whose evaluation takes a way of its own for weights that are plain parameters."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x, mask=None):
        x = self.encoder(x[:, None].repeat(1, 3, 1), src_key_padding_mask=mask)
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_evaluation_behind_step_goes_the_way_that_torch_goes():
    def evaluate(i, model, optimizer, x):
        model.eval()
        with torch.no_grad():
            x1 = x[:, None]
            seen = [model(x), model.encoder.layers[1](x1), model.attention(x1, x1, x1)[0]]
            mask = torch.tensor([[False, False, True]]).repeat(len(x), 1)
            seen.append(model(x, mask))
        model.train()
        return [part.tolist() for part in seen]

    torch.manual_seed(0)
    model = Attending()
    (expected, wanted), (trained, got) = (
        train(mode, evaluate, model=copy.deepcopy(model)) for mode in (None, "forward")
    )
    assert got == wanted
    assert_same(trained, expected)


class Owned(torch.Tensor):
    """A tensor of a library that takes functions over before a parameter is asked."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("how", ["keyword", "in a dictionary"])
def test_inputs_of_a_class_of_their_own_are_found_wherever_they_are(how):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x=None, *, batch=None):
            return self.layer(x if batch is None else batch["x"])

    def evaluate(i, model, optimizer, x):
        x = x.as_subclass(Owned)
        with torch.no_grad():
            return (model(x=x) if how == "keyword" else model(batch={"x": x})).as_subclass(torch.Tensor).tolist()

    torch.manual_seed(0)
    model = Net()
    (expected, wanted), (trained, got) = (
        train(mode, evaluate, model=copy.deepcopy(model)) for mode in (None, "forward")
    )
    assert got == wanted
    assert_same(trained, expected)


def test_an_update_computes_in_the_type_that_was_the_default_at_step():
    class Handwritten(optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        third = torch.tensor(1.0) / 3
                        p.sub_((p.grad.to(third.dtype) * third).to(p.dtype), alpha=group["lr"])

    def read(i, model, optimizer, x):
        torch.set_default_dtype(torch.float64)
        try:
            return [float(p.detach().sum()) for p in model.parameters()]
        finally:
            torch.set_default_dtype(torch.float32)

    same(read, make=lambda model: Handwritten(model.parameters()))


def test_one_gradient_of_two_parameters_is_used_at_once():
    def share(model):
        inner, twice = model.twice.bias, model.norm.bias
        inner.grad = twice.grad

    models = []
    for mode in (None, "forward"):
        model = make_net()
        optimizer = adamw(model)
        fusion = fuse(model, optimizer, mode) if mode else None
        for x, y in batches(6):
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            share(model)
            optimizer.step()
            model.norm.bias.sum()
            model.norm.bias.grad.mul_(2)
        if fusion:
            fusion.detach()
        models.append((model, optimizer))
    assert_same(*models)


def test_a_group_that_gets_what_cannot_be_copied_is_stepped_in_stock_order():
    def add(i, model, optimizer, x):
        if i == 3:
            optimizer.param_groups[0]["rates"] = (0.01 / k for k in itertools.count(1))
        if i >= 3:
            optimizer.param_groups[0]["lr"] = next(optimizer.param_groups[0]["rates"])

    models = [train(mode, add)[0] for mode in (None, "forward")]
    for p, q in zip(models[0][0].parameters(), models[1][0].parameters(), strict=True):
        assert torch.equal(p, q)


def test_an_object_in_a_group_that_changes_behind_step_is_for_the_next():
    class Scale:
        value = 0.5

    class Scaled(optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1, "scale": None})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.sub_(p.grad, alpha=group["lr"] * (group["scale"].value if group["scale"] else 1))

    def change(i, model, optimizer, x):
        if i == 3:
            optimizer.param_groups[0]["scale"] = Scale()
        if i > 3:
            optimizer.param_groups[0]["scale"].value /= 2

    models = [train(mode, change, make=lambda model: Scaled(model.parameters()))[0] for mode in (None, "forward")]
    for p, q in zip(models[0][0].parameters(), models[1][0].parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_step_that_copies_its_parameters_finds_them_as_they_are():
    class Anchored(optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        anchor = copy.deepcopy(p)
                        p.sub_(p.grad * anchor.abs(), alpha=group["lr"])

    same(lambda *_: None, make=lambda model: Anchored(model.parameters()))


def _linear(x, weight, bias):
    return F.linear(x, weight, bias)


@pytest.mark.parametrize("where", ["in forward", "in a method, by a function"])
def test_a_scripted_function_that_is_given_parameters_of_a_layer(where):
    scripted = torch.jit.script(_linear)

    def project(x, layer):
        return scripted(x, layer.weight, layer.bias)

    class InForward(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.inner, self.head = nn.Linear(6, 8), nn.ModuleList([nn.Linear(8, 8)]), nn.Linear(8, 3)

        def forward(self, x):
            layer = self.inner[0]
            return self.head(torch.tanh(scripted(torch.tanh(self.first(x)), layer.weight, layer.bias)))

    class InMethod(InForward):
        def forward(self, x):
            return self.head(torch.tanh(self.middle(torch.tanh(self.first(x)))))

        def middle(self, x):
            return project(x, self.inner[0])

    cls = InForward if where == "in forward" else InMethod
    (expected, _), (trained, waiting) = (
        train(None, model=cls()),
        train("forward", lambda i, model, *_: pending(model), model=cls()),
    )
    assert_same(trained, expected)
    assert all(waiting[1:])
