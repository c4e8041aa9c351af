import copy
import io
from contextlib import nullcontext

import pytest
import torch
from torch import nn, optim

from fusion.loops import Net, adamw, assert_same, batches, loss_of, make_net, train
from gradweave.errors import GradweaveError
from gradweave.fusion import fuse


def pending(model):
    return sum(type(p) is not nn.Parameter for p in model.parameters())


def take_steps(model, optimizer, steps=3):
    for x, y in batches(steps):
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()


@pytest.fixture
def fused():
    """A model with an update pending on every parameter."""
    model = make_net()
    optimizer = adamw(model)
    with fuse(model, optimizer, "forward") as fusion:
        take_steps(model, optimizer)
        assert pending(model) == len(list(model.parameters()))
        yield model, optimizer, fusion


@pytest.fixture(scope="module")
def expected():
    """The result of the same steps in stock order."""
    model = make_net()
    optimizer = adamw(model)
    take_steps(model, optimizer)
    optimizer.zero_grad()
    return model, optimizer


def saved(model):
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer)


READS = {
    "state_dict": lambda m: m.state_dict()["twice.weight"],
    "torch.save": lambda m: saved(m)["twice.weight"],
    ".data": lambda m: m.twice.weight.data,
    ".detach()": lambda m: m.twice.weight.detach(),
    "parameters()": lambda m: [p.clone() for p in m.parameters()][4],
    "deepcopy": lambda m: copy.deepcopy(m).twice.weight,
    "deepcopy of the parameter": lambda m: copy.deepcopy(m.twice.weight),
    "arithmetic": lambda m: m.twice.weight * 1,
    "indexing": lambda m: m.twice.weight[:],
    "norm in a list": lambda m: torch._foreach_mul([m.twice.weight], 1.0)[0],
    "functional call": lambda m: (
        torch.func.functional_call(m.twice, dict(m.twice.named_parameters()), (torch.eye(8),)).T
        - m.twice.bias.detach()[:, None]
    ),
    "eval": lambda m: (m.twice(torch.eye(8)) - m.twice.bias).T,
    "numpy": lambda m: torch.from_numpy(m.twice.weight.detach().numpy()),
    "to": lambda m: copy.deepcopy(m.twice).to(torch.float64).weight.float(),
    "tolist": lambda m: torch.tensor(m.twice.weight.tolist()),
    "vmap": lambda m: torch.vmap(lambda row: row * 1)(m.twice.weight),
    "named_parameters + copy_": lambda m: torch.empty(8, 8).copy_(dict(m.named_parameters())["twice.weight"]),
}


@pytest.mark.parametrize("read", READS)
def test_every_read_through_the_parameter_sees_the_update(fused, expected, read):
    value = READS[read](fused[0]).detach()
    torch.testing.assert_close(value, READS[read](expected[0]).detach(), rtol=0, atol=0)


TRANSFORMS = {
    "grad": lambda f, params: torch.func.grad(f)(params),
    "vjp": lambda f, params: torch.func.vjp(f, params)[1](torch.tensor(1.0))[0],
    "jvp": lambda f, params: {"head.bias": torch.func.jvp(f, (params,), (params,))[1]},
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_function_transform_of_the_model_sees_the_update(fused, expected, transform):
    def gradient(model):
        x, _ = next(batches(1))
        params = dict(model.named_parameters())
        made = TRANSFORMS[transform](lambda p: torch.func.functional_call(model, p, (x,)).square().mean(), params)
        return made["head.bias"]

    assert pending(fused[0]) > 0
    torch.testing.assert_close(gradient(fused[0]), gradient(expected[0]), rtol=0, atol=0)


class TakesOver(torch.Tensor):
    """Runs functions without consulting the other arguments' classes, as quantised and masked tensors do."""

    __torch_function__ = torch._C._disabled_torch_function_impl


def test_an_input_of_another_tensor_class_sees_the_update(fused, expected):
    x, _ = next(batches(1))
    got = fused[0](x.as_subclass(TakesOver)).as_subclass(torch.Tensor)
    torch.testing.assert_close(got, expected[0](x), rtol=0, atol=0)


def test_the_optimizers_state_dict_is_up_to_date(fused, expected):
    mine, theirs = fused[1].state_dict(), expected[1].state_dict()
    for index, state in theirs["state"].items():
        for key, value in state.items():
            assert torch.equal(mine["state"][index][key], value)


def test_reading_one_bucket_leaves_the_others_pending(fused):
    model, _, fusion = fused
    model.head.bias.detach()
    assert 0 < pending(model) < len(list(model.parameters()))
    fusion.flush()
    assert pending(model) == 0


def test_metadata_and_zero_grad_bring_nothing_forward(fused):
    model, optimizer, _ = fused
    count = pending(model)
    optimizer.zero_grad()
    for p in model.parameters():
        assert p.requires_grad
        assert p.dtype is torch.float32
        assert p.device.type == "cpu"
        assert p.grad is None
        assert isinstance(p, nn.Parameter)
    assert pending(model) == count


def test_a_gradient_set_by_hand_is_kept(fused):
    model, _, _ = fused
    model.head.bias.grad = torch.ones(3)
    for _ in range(2):
        assert torch.equal(model.head.bias.grad, torch.ones(3))
        model.head.bias.detach()
    assert type(model.head.bias) is nn.Parameter
    assert vars(model.head.bias) == {}


def test_weights_are_updated_bucket_by_bucket_as_the_forward_goes_on():
    model = make_net()
    optimizer = adamw(model)
    seen = []
    model.norm.register_forward_pre_hook(lambda *_: seen.append(pending(model)))
    with fuse(model, optimizer, "forward"):
        for x, y in batches(3):
            loss_of(model, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert 0 < seen[-1] < len(list(model.parameters()))


def test_checkpoints_are_ordinary_and_resume_bit_for_bit(tmp_path):
    model = make_net()
    optimizer = adamw(model)
    data = list(batches(8))
    with fuse(model, optimizer, "forward"):
        for x, y in data[:4]:
            loss_of(model, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")

    checkpoint = torch.load(tmp_path / "x.pt", weights_only=True)
    resumed = make_net()
    resumed.load_state_dict(checkpoint["model"])
    resumed_optimizer = adamw(resumed)
    resumed_optimizer.load_state_dict(checkpoint["optimizer"])
    with fuse(resumed, resumed_optimizer, "forward"):
        for x, y in data[4:]:
            loss_of(resumed, x, y).backward()
            resumed_optimizer.step()
            resumed_optimizer.zero_grad()
    assert_same((resumed, resumed_optimizer), train(adamw, steps=8))


def test_loading_replaces_what_was_pending(fused):
    model, optimizer, _ = fused
    fresh = make_net()
    model.load_state_dict(fresh.state_dict())
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), fresh.parameters(), strict=True))
    optimizer.load_state_dict(adamw(fresh).state_dict())
    assert optimizer.state_dict()["state"] == {}


def test_distributed_checkpoints_initialise_empty_state():
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    def state(mode):
        model = make_net()
        optimizer = adamw(model)
        fusion = fuse(model, optimizer, mode) if mode else None
        found = get_optimizer_state_dict(model, optimizer)
        if fusion:
            fusion.detach()
        return found

    mine, stock = state("forward"), state(None)
    assert mine["state"].keys() == stock["state"].keys() != set()


@pytest.mark.parametrize("form", [{"fused": True}, {"foreach": True}])
def test_gradient_scaling_with_and_without_infinities(form):
    def run(mode):
        model = make_net()
        optimizer = optim.AdamW(model.parameters(), lr=0.01, **form)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
        fusion = fuse(model, optimizer, mode) if mode else None
        scales = []
        for i, (x, y) in enumerate(batches(9)):
            loss = loss_of(model, x, y) * (float("inf") if i in (3, 4) else 1.0)
            scaler.scale(loss).backward()
            if i % 2:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        if fusion:
            fusion.detach()
        return (model, optimizer), scales

    fused, stock = run("forward"), run(None)
    assert fused[1] == stock[1]
    assert_same(fused[0], stock[0])


class Failing(Net):
    fail = False

    def forward(self, x):
        x = self.norm(self.inner(x))
        if self.fail:
            raise RuntimeError("out of luck")
        return self.head(self.twice(x))


def test_an_exception_in_the_forward_loses_nothing():
    def run(mode):
        model = make_net(cls=Failing)
        optimizer = adamw(model)
        fusion = fuse(model, optimizer, mode) if mode else None
        for i, (x, y) in enumerate(batches(6)):
            if i == 4:
                model.fail = True
                with pytest.raises(RuntimeError, match="out of luck"):
                    model(x)
                model.fail = False
            loss_of(model, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
        if fusion:
            fusion.detach()
        return model, optimizer

    assert_same(run("forward"), run(None))


def test_an_exception_in_the_backward_changes_nothing():
    model = make_net()
    optimizer = adamw(model)
    with fuse(model, optimizer, "forward"):
        take_steps(model, optimizer)
        optimizer.zero_grad()
        before = copy.deepcopy(model.state_dict())
        out = model.norm(model.inner(next(batches(1))[0]))
        out.register_hook(lambda _: (_ for _ in ()).throw(RuntimeError("out of luck")))
        with pytest.raises(RuntimeError, match="out of luck"):
            model.head(model.twice(out)).sum().backward()
        optimizer.zero_grad()
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_two_steps_without_a_forward_in_between():
    def run(mode):
        model = make_net()
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        fusion = fuse(model, optimizer, mode) if mode else None
        for x, y in batches(4):
            loss_of(model, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
            optimizer.zero_grad()
        if fusion:
            fusion.detach()
        return model, optimizer

    assert_same(run("forward"), run(None))


def test_autocast_does_not_reach_the_update():
    def run(mode):
        model = make_net()
        optimizer = optim.AdamW(model.parameters(), lr=0.01, foreach=True)
        fusion = fuse(model, optimizer, mode) if mode else None
        for x, y in batches(5):
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model, x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if fusion:
            fusion.detach()
        return model, optimizer

    assert_same(run("forward"), run(None))
    assert_same(run("backward"), run(None))


def test_lstm_weights_in_a_flat_list():
    class Recurrent(Net):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(6, 8, batch_first=True)

        def forward(self, x):
            return self.head(self.lstm(x[:, None])[0][:, 0])

    assert_same(train(adamw, cls=Recurrent), train(adamw, "forward", cls=Recurrent))


def test_weight_norm_and_attention_read_weights_without_their_modules():
    class Attending(Net):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))

        def forward(self, x):
            x = self.inner(x)[:, None].repeat(1, 3, 1)
            x = self.attention(x, x, x, need_weights=False)[0][:, 0]
            return self.head(self.normed(x))

    assert_same(train(adamw, cls=Attending), train(adamw, "forward", cls=Attending))


def test_several_steps_as_one_graph_would_hold_them():
    """Without a GPU nothing is captured: updates are deferred between the steps, and applied at the end."""

    def run(fused):
        model = make_net()
        optimizer = adamw(model)
        fusion = fuse(model, optimizer, "forward") if fused else None
        for number, (x, y) in enumerate(batches(7)):
            with fusion.in_graph() if fused and number == 3 else nullcontext():
                for _ in range(2):
                    loss_of(model, x, y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            if fused and number == 3:
                assert not fusion._engine.is_pending
                assert not fusion.in_graph_now
            if fused:
                fusion.flush()
        return model, optimizer

    assert_same(run(True), run(False))


def test_a_graph_begins_with_nothing_pending_and_in_forward_mode():
    model = make_net()
    optimizer = adamw(model)
    with fuse(model, optimizer, "forward") as fusion:
        for x, y in batches(3):
            loss_of(model, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
        with pytest.raises(GradweaveError, match=r"call fusion\.flush\(\) before"), fusion.in_graph():
            pass
        fusion.flush()
        with fusion.in_graph():
            assert fusion.in_graph_now
        with pytest.raises(KeyError), fusion.in_graph():
            {}.pop("key")
        assert not fusion.in_graph_now
    other = adamw(model)
    with fuse(model, other, "backward") as fusion:
        assert not fusion.in_graph_now
        with pytest.raises(GradweaveError, match="only mode"), fusion.in_graph():
            pass
