"""Steps in kernels against steps without, in Triton's interpreter; test_step.py runs this in a process of its own.

Directions are small against gradients where these point along the vectors, and rounding then shows: what is compared
closely has a damping that keeps them large, and the slow side is in double precision.
"""

from optim.kernels.interpreted import watched  # noqa: I001

import copy

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from gradweave.optim import Eva, EvaF
from gradweave.optim.kernels import step as kernel_step
from gradweave.optim.kernels.step_tables import BlockSizes
from optim.models import images, loss_of, make_conv, make_mlp, rows, train, weights

BOTH = [Eva, EvaF]
every = pytest.mark.parametrize("cls", BOTH)
SMALL = BlockSizes(
    rows=2, columns=8, narrow_rows=4, narrow_columns=4, max_repeats=2, vector=4, long=8, parts=2, flat=16
)


@pytest.fixture(autouse=True)
def kernels_on_the_cpu(monkeypatch):
    """Run kernels; small layers have output vectors, and uninitialized memory is filled with NaN."""
    monkeypatch.setattr("gradweave.optim.eva.FEWEST_OUTPUTS", 2)
    before, kernel_step.has_kernels = kernel_step.has_kernels, lambda _: True
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    kernel_step.has_kernels = before


class with_blocks:
    def __init__(self, blocks):
        self.blocks = blocks

    def __enter__(self):
        self.before, kernel_step.BLOCK_SIZES = kernel_step.BLOCK_SIZES, self.blocks

    def __exit__(self, *_):
        kernel_step.BLOCK_SIZES = self.before


def give(model, optimizer, slow, slow_optimizer, seed, *, loss_scale=1.0):
    """Give both models the same random gradients and records, in float64 for the slow one."""
    generator = torch.Generator().manual_seed(seed)
    for p, q in zip(model.parameters(), slow.parameters(), strict=True):
        p.grad = torch.randn(p.shape, generator=generator).contiguous(memory_format=order_of(p)) * loss_scale
        q.grad = p.grad.double()
        record = optimizer.state[p].get("record")
        if record is not None:
            record.copy_(torch.randn(record.shape, generator=generator))
            record[optimizer.state[p]["input_vector"].numel()] = 7.0
            slow_optimizer.state[q]["record"].copy_(record)


def order_of(p):
    is_plain = p.dim() != 4 or p.is_contiguous()
    return torch.contiguous_format if is_plain else torch.channels_last


def assert_same(model, optimizer, slow, slow_optimizer, tolerance=1e-5):
    for p, q in zip(model.parameters(), slow.parameters(), strict=True):
        close(p, q, tolerance, f"weight {tuple(p.shape)}")
        assert optimizer.state[p].keys() == slow_optimizer.state[q].keys()
        for key, value in slow_optimizer.state[q].items():
            close(optimizer.state[p][key], value, tolerance, f"{key} {tuple(p.shape)}")


def close(one, other, tolerance, name):
    one, other = (torch.as_tensor(x).detach().double() for x in (one, other))
    scale = other.abs().max().clamp_min(1e-3)
    assert (one - other).abs().max() <= tolerance * scale, (name, float((one - other).abs().max() / scale))


def compare(make, cls, steps=2, blocks=SMALL, prepare=None, tolerance=1e-5, loss_scale=1.0, **options):
    """Take steps with random gradients, with kernels and, in float64, without; compare everything."""
    torch.manual_seed(0)
    model = make()
    slow = copy.deepcopy(model).double()
    dampings = {"damping": 1.0} | ({"output_damping": 1.0} if cls is Eva else {})
    optimizer, slow_optimizer = cls(model, **dampings, **options), cls(slow, foreach=False, **dampings, **options)
    for step in range(steps):
        give(model, optimizer, slow, slow_optimizer, step, loss_scale=loss_scale)
        for one in (optimizer, slow_optimizer):
            if prepare is not None:
                prepare(one, step)
            with with_blocks(blocks):
                one.step()
        assert_same(model, optimizer, slow, slow_optimizer, tolerance)
    assert optimizer._fused.plans
    assert not slow_optimizer._fused.plans
    return optimizer


LINEAR = st.tuples(st.just("linear"), st.integers(1, 18), st.integers(1, 10), st.booleans())
CONVOLUTION = st.tuples(
    st.sampled_from(["conv", "transposed", "last"]), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3),
    st.integers(1, 3), st.booleans(),
)  # fmt: skip


def layer_of(described):
    kind, *rest = described
    if kind == "linear":
        columns, rows_, bias = rest
        return nn.Linear(columns, rows_, bias=bias)
    groups, inputs, outputs, kernel, bias = rest
    cls = nn.ConvTranspose2d if kind == "transposed" else nn.Conv2d
    layer = cls(groups * inputs, groups * outputs, kernel, groups=groups, bias=bias)
    return layer.to(memory_format=torch.channels_last) if kind == "last" else layer


@pytest.mark.timeout(1500)
@settings(max_examples=max(5, settings().max_examples // 20))
@example([("linear", 17, 11, True), ("last", 2, 3, 2, 3, True)], "Eva", 0.0, 2)
@example([("transposed", 2, 3, 2, 3, True), ("linear", 1, 1, True)], "EvaF", 0.1, 2)
@given(
    st.lists(LINEAR | CONVOLUTION, min_size=1, max_size=2),
    st.sampled_from(["Eva", "EvaF"]),
    st.sampled_from([0, 0.1]),
    st.integers(1, 2),
)
def test_steps_of_layers_of_any_shape(layers, name, decay, steps):
    cls = {"Eva": Eva, "EvaF": EvaF}[name]
    compare(lambda: nn.Sequential(*map(layer_of, layers)), cls, steps, weight_decay=decay)


@every
def test_programs_keep_to_themselves(cls):
    """They touch nothing outside of tensors, and write nothing that another program of the launch touches."""
    layers = [("linear", 17, 9, True), ("last", 2, 3, 2, 3, True), ("transposed", 2, 3, 2, 2, True)]
    with watched() as launches:
        compare(lambda: nn.Sequential(*map(layer_of, layers), nn.MultiheadAttention(6, 2)), cls, steps=1)
    assert len(launches) > 10


@every
def test_the_sizes_that_a_gpu_gets(cls):
    compare(
        lambda: nn.Sequential(nn.Linear(300, 70), nn.Linear(64, 50), nn.Conv2d(3, 5, 3), nn.LayerNorm(2100)),
        cls, blocks=BlockSizes(),
    )  # fmt: skip


@every
def test_groups_of_other_momentum_and_signs(cls):
    def with_groups(model, **options):
        first, second, third = model
        groups = [
            {"params": list(first.parameters()), "momentum": 0.3},
            {"params": list(second.parameters()), "momentum": 0.95, "maximize": True},
            {"params": list(third.parameters()), "momentum": 0.0, "weight_decay": 0.2},
        ]
        return cls(model, groups, **options)

    compare(lambda: nn.ModuleList([nn.Linear(5, 6), nn.Linear(9, 4), nn.Conv2d(2, 4, 3)]), with_groups, steps=3)


@every
def test_rows_without_a_gradient_stay_whatever_momentum_they_have(cls):
    model = nn.ModuleList([nn.Linear(5, 6), nn.Linear(9, 4), nn.ConvTranspose2d(2, 3, 2, bias=False)])
    optimizer = cls(model, lr=0.1)
    for step in range(3):
        for p in model.parameters():
            p.grad = torch.randn(p.shape)
        if step == 2:
            model[0].weight.grad[2:4] = 0
            model[0].bias.grad[2] = 0
            model[1].weight.grad.zero_()
            model[1].bias.grad.zero_()
            model[2].weight.grad.zero_()
            before = copy.deepcopy(model)
        optimizer.step()
    moved = (model[0].weight != before[0].weight).any(1)
    assert moved.tolist() == [True, True, False, True, True, True]
    assert model[0].bias[2] == before[0].bias[2]
    for layer, other in zip(model[1:], before[1:], strict=True):
        assert torch.equal(layer.weight, other.weight)
    assert float(optimizer.state[model[1].weight]["momentum_buffer"].abs().max()) > 0


@every
@pytest.mark.parametrize("size", [1e-19, pytest.param(1e-20, marks=pytest.mark.slow), 1e-23])
def test_vectors_that_have_faded_away(cls, size):
    """Their squares have no inverse in float32: there the gradient is used as it is."""
    model = nn.ModuleList([nn.Linear(20, 20, bias=False), nn.Conv2d(4, 4, 3, groups=4, bias=False)])
    optimizer = cls(model, lr=0.1)
    for layer in model:
        optimizer.state[layer.weight]["input_vector"].fill_(size)
    for _ in range(2):
        for p in model.parameters():
            p.grad = torch.randn(p.shape)
        before = copy.deepcopy(model)
        optimizer.step()
        assert all(p.isfinite().all() for p in model.parameters())
        assert all((p != q).all() for p, q in zip(model.parameters(), before.parameters(), strict=True))


@every
def test_a_loss_scale_that_gradients_have_no_square_with(cls):
    compare(
        lambda: nn.ModuleList([nn.Linear(5, 20), nn.LayerNorm(33)]), cls, loss_scale=2.0**80, prepare=_scaled(2.0**80)
    )


def _scaled(scale):
    def prepare(optimizer, _):
        optimizer.grad_scale = torch.tensor(scale)

    return prepare


def test_gradients_of_zeros_at_first_and_later():
    """A layer that was not used gets no vector, and loses none."""

    def prepare(optimizer, step):
        if step != 1:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad.zero_()

    compare(lambda: nn.ModuleList([nn.Linear(5, 6), nn.Conv2d(2, 4, 3)]), Eva, steps=3, prepare=prepare)


@every
def test_groups_rules_rates_and_signs(cls):
    def make():
        return nn.ModuleList([nn.Linear(5, 6), nn.BatchNorm1d(7), nn.Linear(9, 4), nn.LayerNorm(33)])

    compare(make, cls, first_order="sgd", lr=0.05, maximize=True, weight_decay=0.1)
    compare(make, cls, first_order="adamw", lr=torch.tensor(0.05), weight_decay=0.1)

    def with_groups(model, **options):
        groups = [
            {"params": model[2:].parameters(), "lr": 0.01, "weight_decay": 0.3},
            {"params": model[:2].parameters()},
        ]
        return cls(model, groups, **options)

    compare(make, with_groups, lr=0.05, momentum=0.5)


@every
def test_attention(cls):
    compare(lambda: nn.MultiheadAttention(6, 2), cls)


@every
def test_scaled_gradients_and_a_scalers_verdict(cls):
    def scale(optimizer, step):
        optimizer.grad_scale = torch.tensor(64.0)
        optimizer.found_inf = torch.tensor(float(step == 1))

    def make():
        return nn.ModuleList([nn.Linear(5, 6), nn.BatchNorm1d(7), nn.Conv2d(2, 4, 3, groups=2)])

    compare(make, cls, steps=3, prepare=scale, loss_scale=64.0)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's
@every
@pytest.mark.parametrize(
    ("bad", "where"),
    [
        (float("nan"), "weight"),
        pytest.param(float("nan"), "layer", marks=pytest.mark.slow),
        pytest.param(float("inf"), "norm", marks=pytest.mark.slow),
        (float("inf"), "bias"),
    ],
)
def test_gradients_that_are_not_finite_change_nothing(cls, bad, where):
    model = make_conv()
    optimizer = cls(model)
    train(model, optimizer, images(1))
    loss_of(model, images(1)[0]).backward()
    if where == "layer":
        for p in model.head.parameters():
            p.grad.fill_(bad)
    else:
        {"weight": model.head.weight, "norm": model.norm.weight, "bias": model.mix.bias}[where].grad[0] = bad
    records = [state["record"] for state in optimizer.state.values() if "record" in state]
    before = weights(model)
    kept = {p: {k: copy.deepcopy(v) for k, v in state.items() if k != "record"} for p, state in optimizer.state.items()}
    optimizer.step()
    assert torch.equal(before, weights(model))
    for p, state in kept.items():
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(optimizer.state[p][key])), key
    assert all(record.count_nonzero() == 0 for record in records)
    assert optimizer._fused.plans


@every
def test_real_training_follows_the_other_way(cls):
    for make, batches in ((make_mlp, rows(2)), (make_conv, images(2))):
        model, other = make(), make()
        optimizer, stock = cls(model, weight_decay=0.01), cls(other, weight_decay=0.01, foreach=True)
        losses = train(model, optimizer, batches)
        assert losses == pytest.approx(train(other, stock, batches), rel=1e-3)
        assert torch.allclose(weights(model), weights(other), atol=1e-3)
        assert len(optimizer._fused.plans) == 1
        assert not stock._fused.plans


@every
def test_a_step_is_the_same_each_time_and_a_state_dict_goes_on_from_there(cls):
    ends = []
    for resumed in (False, False, True):
        model = make_mlp()
        optimizer = cls(model)
        train(model, optimizer, rows(1))
        if resumed:
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = cls(model)
            optimizer.load_state_dict(state)
        train(model, optimizer, rows(1))
        ends.append(weights(model))
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])


def test_layers_without_gradients_and_vectors_of_zeros():
    def drop(optimizer, step):
        first, second = (group["params"] for group in optimizer.param_groups)
        if step == 1:
            first[0].grad = first[1].grad = None
        if step == 2:
            second[0].grad = None
            optimizer.state[first[2]]["record"].zero_()

    optimizer = compare(
        lambda: nn.ModuleList([nn.Linear(5, 6), nn.Linear(3, 4), nn.LayerNorm(3)]), Eva, 4, prepare=drop
    )
    assert len(optimizer._fused.plans) == 3
    model = nn.Sequential(nn.Linear(3, 2))
    optimizer = EvaF(model)
    model[0].weight.grad, model[0].bias.grad = torch.ones(2, 3), torch.ones(2)
    optimizer.step()
    assert torch.isfinite(weights(model)).all()
    model[0].weight.grad, model[0].bias.grad = torch.zeros(2, 3), torch.zeros(2)
    optimizer.step()
    assert torch.isfinite(weights(model)).all()


def test_a_captured_step_has_addresses_of_its_own(monkeypatch):
    """As if captured: it does not write the table of eager steps, and is refused before a step like it has run."""
    model, other = make_mlp(), make_mlp()
    optimizer, stock = EvaF(model), EvaF(other)

    def step(capturing):
        monkeypatch.setattr(kernel_step, "is_capturing", lambda _: capturing)
        x = rows(1)[0]
        held = torch.zeros(1000)  # gradients are elsewhere than before
        train(model, optimizer, [x])
        monkeypatch.setattr(kernel_step, "is_capturing", lambda _: False)
        train(other, stock, [x])
        assert torch.allclose(weights(model), weights(other), atol=1e-5)
        return held

    step(capturing=True)
    assert not optimizer._fused.plans
    step(capturing=False)
    (plan,) = optimizer._fused.plans.values()
    before = plan.gradients._table.clone()
    kept = [step(capturing=True)]
    assert torch.equal(before, plan.gradients._table)
    assert plan.is_in_graph
    kept.append(step(capturing=False))


def test_ranks_average_their_records_before_these_are_used(monkeypatch):
    model, other = make_mlp(), make_mlp()
    optimizer, stock = EvaF(model), EvaF(other, foreach=True)
    for one in (optimizer, stock):
        monkeypatch.setattr(one, "begin_step", lambda one=one: double_places(one))
    train(model, optimizer, rows(2))
    train(other, stock, rows(2))
    assert optimizer._fused.plans
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        if p.dim() == 2:
            vectors = [one.state[x]["input_vector"] for one, x in ((optimizer, p), (stock, q))]
            assert torch.allclose(*vectors, atol=1e-4)
            assert vectors[0].abs().max() < 0.6


def double_places(optimizer):
    """Pretend that another rank had as many rows, all of zeros."""
    for state in optimizer.state.values():
        if "record" in state:
            state["record"][state["input_vector"].numel()] *= 2


def test_writes_are_told_to_autograd():
    model = make_mlp()
    optimizer = EvaF(model)
    loss_of(model, rows(1)[0]).backward()
    versions = [p._version for p in model.parameters()]
    optimizer.step()
    assert all(p._version > version for p, version in zip(model.parameters(), versions, strict=True))


@pytest.mark.parametrize("why", ["double", "faithful", "reference", "foreach", "order", "damping", "late"])
def test_what_goes_the_other_way(why):
    model = make_conv()
    options = {why: True} if why in ("faithful", "reference", "foreach") else {}
    model = model.double() if why == "double" else model
    optimizer = Eva(model, **options)
    loss_of(model, images(1)[0].to(model.head.weight.dtype)).backward()
    if why == "order":
        model.grouped.weight.grad = model.grouped.weight.grad.contiguous(memory_format=torch.channels_last)
    if why == "damping":
        optimizer.param_groups[0]["damping"] = torch.tensor(0.1)
    if why == "late":
        model.head.weight.grad = model.head.weight.grad.as_subclass(Odd)
    before = weights(model)
    optimizer.step()
    assert not torch.equal(before, weights(model))
    assert not optimizer._fused.plans


class Odd(torch.Tensor):
    pass
