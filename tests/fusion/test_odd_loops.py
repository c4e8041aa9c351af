"""Loops that do things at unusual moments: the same result as stock, or an error; never something else."""

import copy
import pickle

import pytest
import torch
from torch import nn, optim

from fusion.loops import Net, adamw, assert_same, batches, loss_of, make_net
from gradweave._runtime.ab_trial import RULES
from gradweave.errors import GradweaveError, UnsupportedError
from gradweave.fusion import fuse

LONG = 1 + 3 * RULES.rounds * RULES.steps + 4


def sgd(model):
    return optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def run(mode, odd, make=adamw, steps=8, cls=Net):
    model = make_net(cls=cls)
    optimizer = make(model)
    fusion = fuse(model, optimizer, mode) if mode else None
    for i, (x, y) in enumerate(batches(steps)):
        odd(i, model, optimizer, x, y)
    if fusion:
        fusion.detach()
    return model, optimizer


def same_or_refused(odd, *, refused=(), **more):
    stock = run(None, odd, **more)
    for mode in ("forward", "backward", "auto"):
        steps = {"steps": LONG} if mode == "auto" else {}
        if mode in refused:
            with pytest.raises(GradweaveError):
                run(mode, odd, **more)
        else:
            expected = run(None, odd, **{**more, **steps}) if steps else stock
            assert_same(run(mode, odd, **{**more, **steps}), expected)


def test_gradients_taken_away_before_step():
    def odd(i, model, optimizer, x, y):
        loss_of(model, x, y).backward()
        for p in model.head.parameters():
            p.grad = None
        optimizer.step()
        optimizer.zero_grad()

    same_or_refused(odd, refused=["backward"], make=sgd)


def test_gradients_replaced_before_step():
    def odd(i, model, optimizer, x, y):
        loss_of(model, x, y).backward()
        for p in model.head.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        optimizer.zero_grad()

    same_or_refused(odd, refused=["backward"])


def test_weights_changed_before_step():
    def odd(i, model, optimizer, x, y):
        loss_of(model, x, y).backward()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.99)
        optimizer.step()
        optimizer.zero_grad()

    same_or_refused(odd, refused=["backward"])


def test_weights_changed_after_step():
    def odd(i, model, optimizer, x, y):
        loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        for p in model.parameters():
            p.data.clamp_(-0.2, 0.2)

    same_or_refused(odd)


class Skipping(Net):
    use_twice = True

    def forward(self, x):
        x = self.norm(self.inner(x))
        return self.head(self.twice(x) if self.use_twice else x)


def test_zeroed_gradients_of_unused_parameters_still_decay():
    def odd(i, model, optimizer, x, y):
        model.use_twice = i % 3 != 1
        loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    same_or_refused(odd, make=sgd, cls=Skipping)


@pytest.mark.parametrize("then", ["step", "detach"])
def test_a_batch_skipped_before_the_first_step(then):
    def train(mode):
        model = make_net(cls=Skipping)
        optimizer = sgd(model)
        fusion = fuse(model, optimizer, mode) if mode else None
        (x, y), *rest = list(batches(6))
        loss_of(model, x, y).backward()
        optimizer.zero_grad()
        if fusion and then == "detach":
            fusion.detach()
        for i, (x, y) in enumerate(rest):
            model.use_twice = i > 0
            loss_of(model, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
        if fusion:
            fusion.detach()
        return model, optimizer

    for mode in ("forward", "backward", "auto"):
        assert_same(train(mode), train(None))


def test_optimizer_state_edited_while_updates_are_pending():
    def odd(i, model, optimizer, x, y):
        loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if i % 3 == 2:
            for state in optimizer.state.values():
                state["exp_avg"].zero_()
        if i == 5:
            optimizer.state.clear()

    same_or_refused(odd)


def test_optimizer_state_looked_at_and_copied_while_updates_are_pending():
    model = make_net()
    optimizer = adamw(model)
    stock = make_net()
    stock_optimizer = adamw(stock)
    with fuse(model, optimizer, "forward"):
        for x, y in batches(4):
            for m, o in ((model, optimizer), (stock, stock_optimizer)):
                loss_of(m, x, y).backward()
                o.step()
                o.zero_grad()
            assert [p.sum().item() for p, _ in optimizer.state.items()] == [p.sum().item() for p in stock.parameters()]
        loss_of(model, x, y).backward()
        optimizer.step()
        copied, pickled = copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))
    assert type(optimizer.state) is type(stock_optimizer.state)
    for other in (copied, pickled):
        assert type(other.state) is type(stock_optimizer.state)
        assert all(state["step"] == 5 for state in other.state.values())


class CallsParent(optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize("hooked", [False, True])
def test_a_step_that_calls_its_parents(hooked):
    if hooked:
        optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)  # now the parent's step runs hooks, too
    calls = []

    def make(model):
        optimizer = CallsParent(model.parameters(), lr=0.1, momentum=0.9)
        optimizer.register_step_post_hook(lambda *_: calls.append(1))
        return optimizer

    def odd(i, model, optimizer, x, y):
        loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()

    same_or_refused(odd, refused=["forward", "backward"], make=make)


def test_a_second_step_uses_the_gradients_again():
    def odd(i, model, optimizer, x, y):
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
        if i % 3 == 2:
            optimizer.step()

    same_or_refused(odd, refused=["backward"])


@pytest.mark.parametrize("when", [0, 4])
def test_a_harmless_hook_added_after_attaching(when):
    def odd(i, model, optimizer, x, y):
        if i == when:
            optimizer.register_step_pre_hook(lambda *_: None)
        loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()

    same_or_refused(odd)


def test_a_parameter_moved_to_another_group():
    def make(model):
        named = list(model.parameters())
        return optim.SGD([{"params": named[:4]}, {"params": named[4:], "lr": 0.5}], lr=0.01)

    def odd(i, model, optimizer, x, y):
        if i == 4:
            one, two = optimizer.param_groups
            one["params"].append(two["params"].pop(0))
        loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()

    same_or_refused(odd, make=make)


@pytest.mark.parametrize("at", [0, 1, 4])
def test_a_model_that_is_converted(at):
    def odd(i, model, optimizer, x, y):
        if i == at:
            model.double()
        loss_of(model, x.to(model.scale.dtype), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    same_or_refused(odd, make=sgd)


def test_parameters_of_a_part_that_is_fused_cannot_be_fused_again_through_the_part():
    model = make_net()
    with (
        fuse(model, adamw(model), "forward"),
        pytest.raises(UnsupportedError, match="another optimizer that is fused"),
    ):
        fuse(model.inner, adamw(model.inner), "forward")


def test_numpy_of_a_gradient_that_is_gone_says_why():
    model = make_net()
    with fuse(model, adamw(model), "backward"):
        loss_of(model, *next(batches(1))).backward()
        with pytest.raises(GradweaveError, match='use mode="forward"'):
            model.head.weight.grad.cpu().numpy()


@pytest.mark.parametrize("mode", ["forward", "backward"])
@pytest.mark.parametrize("which", ["parameter", "group"])
def test_parameters_taken_out_of_the_optimizer(mode, which):
    def odd(i, model, optimizer, x, y):
        if i == 4 and which == "parameter":
            optimizer.param_groups[0]["params"].pop()
        elif i == 4:
            optimizer.param_groups.pop()
        loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()

    def make(model):
        params = list(model.parameters())
        return optim.AdamW([{"params": params[:4]}, {"params": params[4:]}], lr=0.01)

    model, _ = run(mode, odd, make, steps=30)
    expected, _ = run(None, odd, make, steps=30)
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(p, q)


def test_state_loaded_between_backward_and_step():
    saved = adamw(make_net()).state_dict()

    def odd(i, model, optimizer, x, y):
        loss_of(model, x, y).backward()
        if i == 5:
            optimizer.load_state_dict(saved)
        optimizer.step()
        optimizer.zero_grad()

    assert_same(run("forward", odd), run(None, odd))
    with pytest.raises(GradweaveError, match="needs zero_grad"):
        run("backward", odd)


class Fails(optim.Optimizer):
    """An optimizer whose own step can fail."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
        self.broken = False

    @torch.no_grad()
    def step(self, closure=None):
        if self.broken:
            raise RuntimeError("broken")
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"])


@pytest.mark.parametrize("mode", ["forward", "backward"])
def test_a_step_that_fails_leaves_every_parameter_in_the_state_dict(mode):
    model = make_net()
    optimizer = Fails(model.parameters(), lr=0.05)
    with fuse(model, optimizer, mode):
        for i, (x, y) in enumerate(batches(4)):
            loss_of(model, x, y).backward()
            optimizer.broken = i == 3
            if optimizer.broken and mode == "forward":
                with pytest.raises(RuntimeError):
                    optimizer.step()
            elif not optimizer.broken:
                optimizer.step()
                optimizer.zero_grad()
            optimizer.broken = False
        assert len(optimizer.state_dict()["param_groups"][0]["params"]) == len(list(model.parameters()))


@pytest.mark.parametrize("at", [0, 1, 4])
def test_a_layer_that_is_frozen_between_backward_and_step(at):
    def odd(i, model, optimizer, x, y):
        loss_of(model, x, y).backward()
        if i == at:
            model.inner.requires_grad_(requires_grad=False)
        optimizer.step()
        optimizer.zero_grad()

    same_or_refused(odd, make=sgd)
