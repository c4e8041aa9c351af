import copy
from collections import defaultdict
from contextlib import contextmanager

import pytest
import torch
from torch import nn, optim

from fusion.loops import Net, adamw, assert_same, batches, loss_of, make_net, train
from gradweave.errors import GradweaveError
from gradweave.fusion import fuse
from gradweave.fusion.backward import State


@pytest.fixture
def fused():
    model = make_net()
    optimizer = adamw(model)
    with fuse(model, optimizer, "backward") as fusion:
        yield model, optimizer, fusion


def step(model, optimizer, x, y):
    loss_of(model, x, y).backward()
    optimizer.step()
    optimizer.zero_grad()


def warm_up(model, optimizer, steps=2):
    for x, y in batches(steps):
        step(model, optimizer, x, y)


READS = {
    "clip by norm": lambda m, o: nn.utils.clip_grad_norm_(m.parameters(), 1.0),
    "clip by norm, one by one": lambda m, o: nn.utils.clip_grad_norm_(m.parameters(), 1.0, foreach=False),
    "clip by value": lambda m, o: nn.utils.clip_grad_value_(m.parameters(), 1.0),
    "norm": lambda m, o: m.head.weight.grad.norm(),
    "scale in place": lambda m, o: m.head.weight.grad.mul_(0.5),
    "clone": lambda m, o: m.head.weight.grad.clone(),
    "item": lambda m, o: m.head.bias.grad[0].item(),
    "unscale": lambda m, o: torch.amp.GradScaler("cpu", init_scale=2.0).unscale_(o),
}


@pytest.mark.parametrize("read", READS)
def test_a_loop_that_reads_gradients_is_refused_in_the_first_step(fused, read):
    model, optimizer, _ = fused
    before = copy.deepcopy(model.state_dict())
    x, y = next(batches(1))
    loss_of(model, x, y).backward()
    if read == "unscale":
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        scaler.scale(torch.tensor(1.0))
        with pytest.raises(GradweaveError, match='use mode="forward"'):
            scaler.unscale_(optimizer)
    else:
        with pytest.raises(GradweaveError, match=r'no weight has been changed; use mode="forward"'):
            READS[read](model, optimizer)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("read", [name for name in READS if name != "unscale"])
def test_any_later_read_raises(fused, read):
    model, optimizer, _ = fused
    warm_up(model, optimizer)
    loss_of(model, *next(batches(1))).backward()
    with pytest.raises(GradweaveError, match=r'\.grad that is gone.*use mode="forward"'):
        READS[read](model, optimizer)


def test_gradients_are_freed_while_backward_goes_on():
    """At most one bucket's gradients are alive at a time after the first step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    most = 0

    def count(_):
        nonlocal most
        most = max(most, sum(type(p.grad) is torch.Tensor for p in model.parameters()))

    with fuse(model, optimizer, "backward") as fusion:
        for i in range(3):
            if i == 2:
                for p in model.parameters():
                    p.register_post_accumulate_grad_hook(count)
            model(torch.randn(2, 16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        largest = max(len(bucket.params) for bucket in fusion._engine.buckets)
        assert len(fusion._engine.buckets) == 8
    assert most <= largest


def test_a_model_may_be_compiled_where_gradients_are_gone():
    """For evaluation, for example, between a step and the next zero_grad()."""

    def run(mode):
        torch._dynamo.reset()
        model = make_net()
        optimizer = adamw(model)
        compiled = torch.compile(model, backend="aot_eager")
        fusion = fuse(compiled, optimizer, mode) if mode else None
        seen = []
        for x, y in batches(3):
            optimizer.zero_grad()
            loss_of(compiled, x, y).backward()
            optimizer.step()
            with torch.no_grad():
                seen.append(compiled(x))
        if fusion:
            fusion.detach()
        return (model, optimizer), seen

    (trained, seen), (expected, wanted) = run("backward"), run(None)
    assert_same(trained, expected)
    assert all(torch.equal(a, b) for a, b in zip(seen, wanted, strict=True))


def test_updates_happen_before_step(fused):
    model, optimizer, _ = fused
    warm_up(model, optimizer)
    before = copy.deepcopy(model.state_dict())
    loss_of(model, *next(batches(1))).backward()
    assert not torch.equal(before["head.weight"], model.state_dict()["head.weight"])


@pytest.mark.parametrize("when", ["first step", "later"])
def test_a_second_backward_is_refused(fused, when):
    model, optimizer, _ = fused
    if when == "later":
        warm_up(model, optimizer)
    x, y = next(batches(1))
    loss = loss_of(model, x, y)
    loss.backward(retain_graph=True)
    with pytest.raises(GradweaveError, match=r"second backward.*fusion\.no_update\(\)"):
        loss_of(model, x, y).backward()


def test_several_losses_and_retain_graph_with_no_update():
    def run(mode):
        model = make_net()
        optimizer = adamw(model)
        fusion = fuse(model, optimizer, mode) if mode else None
        for x, y in batches(5):
            out = model(x)
            first, second = nn.functional.cross_entropy(out, y), out.square().mean()
            if fusion:
                with fusion.no_update():
                    first.backward(retain_graph=True)
            else:
                first.backward(retain_graph=True)
            second.backward()
            optimizer.step()
            optimizer.zero_grad()
        if fusion:
            fusion.detach()
        return model, optimizer

    assert_same(run("backward"), run(None))
    assert_same(run("forward"), run(None))


def test_a_skipped_step_is_noticed(fused):
    """A loop that skips step() would train on silently, since the weights have changed already."""
    model, optimizer, _ = fused
    warm_up(model, optimizer)
    x, y = next(batches(1))
    loss_of(model, x, y).backward()
    optimizer.zero_grad()
    with pytest.raises(GradweaveError, match=r"a backward without step\(\) after it"):
        loss_of(model, x, y).backward()


def test_hyperparameters_changed_between_backward_and_step_are_refused(fused):
    model, optimizer, _ = fused
    warm_up(model, optimizer)
    loss_of(model, *next(batches(1))).backward()
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(GradweaveError, match=r"param_groups\[0\]\['lr'\] changed from 0.01 to 0.5 between backward"):
        optimizer.step()


def test_double_backward_is_refused(fused):
    model, _, _ = fused
    with pytest.raises(GradweaveError, match=r"create_graph=True.*use mode=\"forward\""):
        loss_of(model, *next(batches(1))).backward(create_graph=True)


class Failing(Net):
    """Fails in the middle of a backward when told to."""

    fail = False

    def forward(self, x):
        x = self.norm(torch.relu(self.inner(x)))
        if self.fail:
            x.register_hook(self._fail)
        return self.head(self.twice(x))

    @staticmethod
    def _fail(_):
        raise RuntimeError("out of luck")


@pytest.fixture
def failed():
    model = make_net(cls=Failing)
    optimizer = adamw(model)
    fusion = fuse(model, optimizer, "backward")
    warm_up(model, optimizer)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    model.fail = True
    with pytest.raises(RuntimeError, match="out of luck"):
        loss_of(model, *next(batches(1))).backward()
    model.fail = False
    yield model, optimizer, fusion, saved
    fusion.detach()


def test_a_failed_backward_leaves_whole_buckets_and_says_which(failed):
    model, optimizer, fusion, (saved_model, _) = failed
    changed = {name for name, p in model.named_parameters() if not torch.equal(saved_model[name], p)}
    names = {p: name for name, p in model.named_parameters()}
    buckets = [{names[p] for p in bucket.params} for bucket in fusion._engine.buckets]
    done = [bucket for bucket in buckets if bucket & changed]
    assert done
    assert changed == set().union(*done)
    assert not changed & {"inner.weight", "inner.bias"}
    for p, name in names.items():
        if name == "scale":
            continue
        assert optimizer.state[p]["step"] == (3 if name in changed else 2)
    with pytest.raises(GradweaveError, match=r"backward failed after it had updated bucket\(s\) 0.*accept_partial\(\)"):
        optimizer.step()


def test_after_a_failed_backward_a_checkpoint_restores(failed):
    model, optimizer, _, (saved_model, saved_optimizer) = failed
    model.load_state_dict(saved_model)
    optimizer.load_state_dict(saved_optimizer)
    optimizer.zero_grad()
    for x, y in batches(3):
        step(model, optimizer, x, y)

    stock = make_net(cls=Failing)
    stock_optimizer = adamw(stock)
    warm_up(stock, stock_optimizer)
    for x, y in batches(3):
        step(stock, stock_optimizer, x, y)
    assert_same((model, optimizer), (stock, stock_optimizer))


def test_a_partial_update_can_be_accepted(failed):
    model, optimizer, fusion, _ = failed
    fusion.accept_partial()
    optimizer.zero_grad()
    for x, y in batches(2):
        step(model, optimizer, x, y)
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_a_failure_before_any_update_changes_nothing(fused):
    model, optimizer, _ = fused
    warm_up(model, optimizer)
    out = model(next(batches(1))[0])
    out.register_hook(Failing._fail)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="out of luck"):
        out.sum().backward()
    optimizer.zero_grad()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    warm_up(model, optimizer)


class UsesWeightAgain(Net):
    """Uses a weight a second time, detached, so that its gradient does not wait for that use."""

    def forward(self, x):
        hidden = self.inner(x)
        return self.head(torch.tanh(hidden @ self.twice.weight.detach())) + self.head(self.twice(hidden.detach()))


def test_a_stale_use_of_an_updated_weight_raises_instead_of_giving_a_wrong_gradient():
    for form in ({"fused": True}, {"foreach": True}):
        model = make_net(cls=UsesWeightAgain)
        optimizer = optim.SGD(model.parameters(), lr=0.1, **form)
        with fuse(model, optimizer, "backward"):
            try:
                for x, y in batches(4):
                    step(model, optimizer, x, y)
            except RuntimeError as error:
                assert "modified by an inplace operation" in str(error)  # noqa: PT017
                continue

        stock = make_net(cls=UsesWeightAgain)
        stock_optimizer = optim.SGD(stock.parameters(), lr=0.1, **form)
        for x, y in batches(4):
            step(stock, stock_optimizer, x, y)
        assert_same((model, optimizer), (stock, stock_optimizer))


class Reordered(Net):
    """Uses its layers in another order from the third call on."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        x = self.inner(x)
        parts = [self.twice, self.norm] if self.calls <= 2 else [self.norm, self.twice]
        for part in parts:
            x = torch.tanh(part(x))
        return self.head(x)


def test_another_order_of_gradients_is_still_exact():
    assert_same(train(adamw, cls=Reordered), train(adamw, "backward", cls=Reordered))


@pytest.mark.parametrize("how", ["cleared", "replaced"])
def test_a_state_that_is_reset_between_backward_and_step_is_refused(how):
    model = make_net()
    optimizer = adamw(model)
    fuse(model, optimizer, "backward")
    for i, (x, y) in enumerate(batches(4)):
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        if i == 3:
            if how == "cleared":
                optimizer.state.clear()
            else:
                optimizer.state = defaultdict(dict)
            with pytest.raises(GradweaveError, match="state was cleared or replaced between backward"):
                optimizer.step()
        else:
            optimizer.step()


def test_a_conversion_between_backward_and_step_is_refused_and_detach_gives_gradients_back():
    model = make_net()
    optimizer = adamw(model)
    fusion = fuse(model, optimizer, "backward")
    x, y = next(batches(1))
    loss_of(model, x, y).backward()
    with pytest.raises(GradweaveError, match="no weight has been changed"):
        model.double()
    fusion.detach()
    assert all(p.grad is not None and p.grad.dtype is p.dtype for p in model.parameters())


class Mixed(nn.Module):
    """Two layers, each of which may have a type of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 40), nn.Linear(40, 3)

    def forward(self, x):
        return self.last(self.first(x.to(self.first.weight)).to(self.last.weight))


def test_states_of_a_loop_that_converts_the_layer_whose_gradients_come_first():
    model = Mixed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fusion = fuse(model, optimizer, "backward")
    states = []
    for i, (x, _) in enumerate(batches(5)):
        if i == 2:
            model.last.double()
        states.append([fusion._engine.state])
        model(x).square().sum().backward()
        states[-1].append(fusion._engine.state)
        optimizer.step()
        optimizer.zero_grad()
    fusion.detach()
    assert states == [
        [State.WATCHING, State.WATCHING],
        [State.READY, State.UPDATED],
        [State.READY, State.OUTDATED],
        [State.WATCHING, State.WATCHING],
        [State.READY, State.UPDATED],
    ]


def zeros_stay(model, optimizer, fusion, x, y):
    loss_of(model, x, y).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def two_micro_batches(model, optimizer, fusion, x, y):
    with fusion.no_update():
        loss_of(model, x, y).backward()
    step(model, optimizer, x, y)


@pytest.mark.parametrize("loop", [zeros_stay, two_micro_batches])
def test_gradients_that_backward_adds_to_are_updated_in_backward(fused, loop):
    """Such a gradient was there before backward, as one that the loop keeps was."""
    *_, fusion = fused
    loop(*fused, *next(iter(batches(1))))  # watched, in stock order
    updated = []

    @contextmanager
    def note(bucket):
        updated.append(bucket)
        yield

    fusion.record(note)
    for x, y in batches(3):
        loop(*fused, x, y)
    assert updated
