"""Forwards that go a way that is known, in Triton's interpreter; test_forwards.py runs this in a process of its own."""

from optim.interpreted import watched  # noqa: I001

import copy
import gc
import pickle
from weakref import ref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gradweave.optim import Eva, EvaF, forwards, fused
from optim.models import images, make_conv, make_mlp, train, weights

every = pytest.mark.parametrize("cls", [Eva, EvaF])


@pytest.fixture(autouse=True)
def kernels_on_the_cpu(monkeypatch):
    monkeypatch.setattr(fused, "has_kernels", lambda _: True)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class Pair:
    """A model whose layers are watched together, and one that does without kernels."""

    def __init__(self, model, cls=EvaF, **options):
        self.model, self.stock = model, copy.deepcopy(model)
        self.optimizer, self.other = cls(self.model, **options), cls(self.stock, **options)

    @property
    def forwards(self):
        return self.optimizer._capture._catcher.forwards

    def both(self, backward):
        """Does the same with both; how many forwards were left to one hook."""
        before = self.forwards.taken
        with watched():
            backward(self.model)
        fused.has_kernels = lambda _: False
        backward(self.stock)
        fused.has_kernels = lambda _: True
        return self.forwards.taken - before

    def assert_same(self, *, drop=True):
        for p, q in zip(self.model.parameters(), self.stock.parameters(), strict=True):
            if "record" in self.optimizer.state[p]:
                ours, stock = self.optimizer.state[p]["record"], self.other.state[q]["record"]
                torch.testing.assert_close(ours, stock, rtol=1e-5, atol=5e-5)
        if drop:
            self.optimizer.zero_grad()
            self.other.zero_grad()


def square(model, x):
    out = model(x)
    return sum(part.float().square().mean() for part in (out if isinstance(out, tuple) else (out,)))


def backward_of(x):
    return lambda model: square(model, x).backward()


@every
def test_the_second_forward_of_a_kind_leaves_nothing_in_its_graph(cls):
    pair = Pair(make_mlp(), cls)
    x = torch.randn(6, pair.model[0].in_features)
    assert pair.both(backward_of(x)) == 0
    pair.assert_same()
    for _ in range(2):
        assert pair.both(backward_of(x)) == 1
        pair.assert_same()
    if cls is Eva:  # whose bias-free layer is watched in backward too
        return
    names = set()
    nodes = [pair.model(x).grad_fn]
    while nodes:
        node = nodes.pop()
        names.add(type(node).__name__)
        nodes += [other for other, _ in node.next_functions if other is not None]
    assert not any("Through" in name for name in names)


def test_steps_are_those_without():
    pair = Pair(make_conv())
    given = images(5)
    with watched():
        ours = train(pair.model, pair.optimizer, given)
    fused.has_kernels = lambda _: False
    stock = train(pair.stock, pair.other, given)
    assert ours == pytest.approx(stock, rel=1e-4)
    assert torch.allclose(weights(pair.model), weights(pair.stock), atol=1e-4)


def test_batches_of_other_sizes_have_ways_of_their_own():
    pair = Pair(make_mlp())
    big, small = (torch.randn(count, pair.model[0].in_features) for count in (6, 4))
    taken = []
    for x in (big, small, big, small, big):
        taken.append(pair.both(backward_of(x)))
        pair.assert_same()
    assert taken == [0, 0, 1, 1, 1]


def test_forwards_are_counted_as_often_as_backward_passes_them():
    pair = Pair(make_mlp())
    x = torch.randn(6, pair.model[0].in_features)

    def thrown_away(model):
        square(model, x)
        square(model, 2 * x).backward()
        square(model, x)

    def twice(model):
        value = square(model, x)
        value.backward(retain_graph=True)
        (3 * value).backward()

    def siblings(model):
        (square(model, x) + square(model, -x)).backward()

    def evaluated(model):
        with torch.no_grad():
            model(x)
        square(model, x).backward()

    pair.both(backward_of(x))
    pair.assert_same()
    for backward, taken in ((thrown_away, 3), (twice, 1), (siblings, 2), (evaluated, 1)):
        assert pair.both(backward) == taken
        pair.assert_same()


class Branches(nn.Module):
    """Layers that are called in an order that can be chosen."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5, bias=number % 2 == 0) for number in range(4))
        self.order = [0, 1, 2, 3]
        self.fails = False

    def forward(self, x):
        for number in self.order:
            x = torch.tanh(self.layers[number](x))
        if self.fails:
            raise ValueError("on purpose")
        return x


@settings(max_examples=25)
@given(orders=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=2, max_size=4), cls=st.booleans())
def test_any_ways(orders, cls):
    pair = Pair(Branches(), EvaF if cls else Eva)
    x = torch.randn(4, 5)
    for order in [*orders, orders[0]]:
        pair.model.order = pair.stock.order = order
        pair.both(backward_of(x))
        pair.assert_same()


def test_a_forward_that_fails_leaves_nothing_behind():
    pair = Pair(Branches())
    x = torch.randn(4, 5)
    for _ in range(2):
        pair.both(backward_of(x))
        pair.assert_same()

    def failing(model):
        model.fails = True
        with pytest.raises(ValueError, match="on purpose"):
            model(x)
        model.fails = False
        model.layers[0](x).sum().backward()

    pair.both(failing)
    assert pair.forwards.going is None
    pair.assert_same()
    assert pair.both(backward_of(x)) == 1
    pair.assert_same()


class Mixed(nn.Module):
    """A norm in float32 in front of layers in bfloat16: autograd keeps a copy of their input, not the input."""

    def __init__(self, change=None):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.change = change

    def forward(self, x):
        for norm, layer in zip(self.norms, self.layers, strict=True):
            given = norm(x)
            with torch.autocast("cpu", torch.bfloat16):
                x = x + layer(given)
            if self.change is not None:
                self.change(given)
        return x


@pytest.mark.parametrize("bound", [1, 300, 1 << 20])
def test_inputs_that_autograd_does_not_keep(bound, monkeypatch):
    monkeypatch.setattr(forwards, "_HELD_BYTES", bound)
    pair = Pair(Mixed())
    x = torch.randn(5, 8)
    for taken in (0, 1, 1):
        assert pair.both(backward_of(x)) == taken
        pair.assert_same()


def test_what_is_held_and_changed_in_place_is_not_counted():
    """A step then goes on with the vectors it has."""
    pair = Pair(Mixed())
    x = torch.randn(5, 8)
    pair.both(backward_of(x))
    pair.assert_same()
    pair.model.change = pair.stock.change = lambda given: given.detach().mul_(3)
    pair.both(backward_of(x))
    for layer, stock in zip(pair.model.layers, pair.stock.layers, strict=True):
        ours, other = pair.optimizer.state[layer.weight]["record"], pair.other.state[stock.weight]["record"]
        assert torch.allclose(ours, other, atol=5e-5) or float(ours.abs().sum()) == 0
    pair.optimizer.zero_grad()
    pair.other.zero_grad()


class Wrapped:
    """What no library knows how to look into."""

    def __init__(self, value):
        self.value = value


@pytest.mark.parametrize("kind", ["hidden", "aside"])
def test_gradients_from_elsewhere_than_what_is_returned(kind, caplog):
    caplog.set_level("INFO", "gradweave")

    class Odd(Branches):
        def forward(self, x):
            out = super().forward(x)
            self.aside = out.square().mean()
            return Wrapped(out) if kind == "hidden" else 2 * out

    pair = Pair(Odd())
    x = torch.randn(4, 5)

    def backward(model):
        model(x)
        model.aside.backward()

    for number in range(4):
        pair.both(backward)
        if kind == "hidden" or number != 1:
            pair.assert_same(drop=False)
        pair.optimizer.step()
        pair.other.step()
        pair.optimizer.zero_grad()
        pair.other.zero_grad()
        pair.stock.load_state_dict(pair.model.state_dict())
    assert ("come from elsewhere" in caplog.text) == pair.forwards._is_off == (kind == "aside")


def test_several_outputs_and_models_inside_of_themselves():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 5)

        def forward(self, x, deeper=True):
            out = torch.tanh(self.layer(x))
            return (out, self(out, deeper=False)[0]) if deeper else (out,)

    pair = Pair(Two())
    x = torch.randn(4, 5)
    for taken in (0, 1, 1):
        assert pair.both(backward_of(x)) == taken
        pair.assert_same()


def test_a_state_dict_is_loaded_between_forwards():
    pair = Pair(make_mlp())
    x = torch.randn(6, pair.model[0].in_features)
    for number in range(4):
        pair.both(backward_of(x))
        pair.assert_same()
        if number == 1:
            pair.optimizer.load_state_dict(pair.optimizer.state_dict())


def test_copies_of_a_model_are_stock():
    pair = Pair(make_mlp())
    x = torch.randn(6, pair.model[0].in_features)
    for _ in range(2):
        pair.both(backward_of(x))
    for twin in (copy.deepcopy(pair.model), pickle.loads(pickle.dumps(pair.model))):
        twin(x).sum().backward()
    pair.assert_same()


def test_inputs_live_no_longer_than_their_graph():
    pair = Pair(make_mlp())
    x = torch.randn(6, pair.model[0].in_features)
    seen = []
    pair.model[2].register_forward_pre_hook(lambda _, args: seen.append(ref(args[0])))
    for _ in range(2):
        square(pair.model, x).backward()
    out = square(pair.model, x)
    assert seen[-1]() is not None
    del out
    gc.collect()
    assert seen[-1]() is None


def test_rows_and_convolutions_of_every_layout():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 4, 1),
                          nn.Flatten(2), nn.Linear(16, 3))  # fmt: skip
    pair = Pair(model, Eva)
    x = torch.randn(4, 3, 6, 6)
    for order in (torch.contiguous_format, torch.channels_last):
        given = x.contiguous(memory_format=order)
        for taken in (0, 1):
            assert pair.both(backward_of(given)) == taken
            pair.assert_same()


def test_a_model_that_is_one_layer():
    pair = Pair(nn.Linear(5, 3))
    for taken in (0, 1):
        x = torch.randn(4, 5)
        assert pair.both(backward_of(x)) == taken
        pair.assert_same()


def test_memory_that_begins_elsewhere_is_read_as_it_can_be():
    """Kernels read several channels at once of the first, and must not of the second."""
    pair = Pair(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)))
    memory = torch.randn(4 * 8 + 1)
    for x, taken in ((memory[:32], 0), (memory[:32], 1), (memory[1:], 0), (memory[:32], 0), (memory[:32], 1)):
        assert pair.both(backward_of(x.view(4, 8))) == taken
        pair.assert_same()
