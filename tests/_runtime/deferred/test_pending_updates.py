import copy
import gc
import multiprocessing
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

from _runtime.deferred.comparison import pending, same, train
from fusion.loops import adamw, assert_same, batches, loss_of, make_net
from gradweave import DataParallel, fuse
from gradweave._runtime.deferred.pending_updates import Progress


@pytest.fixture
def no_collection():
    """Disable garbage collection: reference counts alone must free gradients."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def step(call, optimizer, look=lambda: None):
    call(torch.ones(2, 3)).sum().backward()
    looked = look()
    optimizer.step()
    optimizer.zero_grad()
    return looked


@pytest.mark.usefixtures("no_collection")
def test_gradients_are_freed_when_their_update_is_done():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fusion = fuse(model, optimizer, "forward")
    seen = [step(model, optimizer, lambda: [weakref.ref(p.grad) for p in model.parameters()]) for _ in range(4)]
    fusion.flush()
    assert not any(gradient() is not None for gradients in seen for gradient in gradients)


@pytest.mark.usefixtures("no_collection")
def test_the_memory_of_messages_is_used_again():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = DataParallel(model, optimizer, policy="no_barrier")
    places = []
    for _ in range(5):
        step(wrapped, optimizer)
        places.append([message._result.data_ptr() for message in wrapped._reducer.messages])
    assert places[2] == places[3] == places[4]


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


def test_progress_of_an_update_on_the_cpu():
    model = make_net()
    seen = []
    with fuse(model, adamw(model), "forward") as fusion:
        updates = fusion._engine._updates.pending
        fusion.record(lambda _: nullcontext(seen.extend(update.progress for update in updates._pending.values())))
        for x, y in batches(2):
            loss_of(model, x, y).backward()
            fusion.optimizer.step()
        (first, *others) = updates._pending.values()
        assert {update.progress for update in (first, *others)} == {Progress.WAITING}
        first.bucket.params[0].sum()
        assert seen == [Progress.RUNNING] + [Progress.WAITING] * len(others)
        assert first not in updates._pending.values()
