"""Statistics by kernels against those without, in Triton's interpreter: test_gpu_statistics.py runs this."""

from optim.kernels.interpreted import watched  # noqa: I001

import copy
import gc
from threading import Event, Thread
from weakref import ref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradweave.optim import Eva, EvaF
from gradweave.optim.kernels import gpu_statistics, sums, sums_tables
from gradweave.optim.kernels.launch import AddressTable
from optim.models import make_mlp

BOTH = [Eva, EvaF]
every = pytest.mark.parametrize("cls", BOTH)
calls = []
rounds = [1]


@pytest.fixture(autouse=True, params=[1, 2], ids=["at first", "later"])
def kernels_on_the_cpu(monkeypatch, request):
    """Run kernels, in the first step and in a later one; uninitialized memory is filled with NaN."""
    calls.clear()
    rounds[0] = request.param
    original = gpu_statistics.observe_call

    def noted(*args, **options):
        calls.append(original(*args, **options))
        return calls[-1]

    monkeypatch.setattr("gradweave.optim.statistics.hooks.observe_call", noted)
    monkeypatch.setattr(gpu_statistics, "has_kernels", lambda _: True)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def set_capturing(monkeypatch, *, capturing):
    for module in (gpu_statistics, sums, sums_tables):
        monkeypatch.setattr(module, "is_capturing", lambda _: capturing)


def records_of(model, cls, backward, *, with_kernels, options=None):
    """Return the records of a model's layers after a backward of its copy."""
    model = copy.deepcopy(model)
    optimizer = cls(model, **(options or {}))
    gpu_statistics.has_kernels = lambda _: with_kernels
    for _ in range(rounds[0] - 1):
        backward(model)
        optimizer.zero_grad()
    backward(model)
    gpu_statistics.has_kernels = lambda _: True
    return [state["record"] for state in optimizer.state.values() if "record" in state]


def assert_same_records(model, cls, backward, by_kernels=True, **options):
    with watched():
        ours = records_of(model, cls, backward, with_kernels=True, options=options)
    assert any(calls) is by_kernels
    stock = records_of(model, cls, backward, with_kernels=False, options=options)
    assert len(ours) == len(stock) > 0
    for one, other in zip(ours, stock, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=5e-5)
        assert float(other.abs().max()) > 0


def loss(model, x):
    return model(x).square().mean()


convolutions = st.tuples(
    st.sampled_from([nn.Conv1d, nn.Conv2d, nn.Conv3d]), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2),
    st.integers(1, 2), st.sampled_from([1, 2, 4]), st.sampled_from(["zeros", "circular", "replicate"]),
    st.booleans(), st.sampled_from([4, 16]), st.integers(0, 1000),
)  # fmt: skip


@pytest.mark.timeout(1500)
@every
@settings(max_examples=max(5, settings().max_examples // 20))
@given(case=convolutions)
def test_convolutions(cls, case):
    kind, kernel, stride, padding, dilation, groups, mode, channels_last, channels, seed = case
    torch.manual_seed(seed)
    model = nn.Sequential(
        kind(channels, 8, kernel, stride, padding, dilation, groups, padding_mode=mode),
        nn.Tanh(),
        kind(8, 4, 1, bias=False),
    )
    x = torch.randn(5, channels, *{nn.Conv1d: (9,), nn.Conv2d: (7, 9), nn.Conv3d: (5, 6, 7)}[kind])
    if channels_last and kind is nn.Conv2d:
        x = x.contiguous(memory_format=torch.channels_last)
    assert_same_records(model, cls, lambda model: loss(model, x).backward())


@pytest.mark.parametrize("channels_last", [True, False])
def test_samples_that_are_added_up_to_several_images(channels_last):
    model = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.Tanh(), nn.Conv2d(8, 4, (1, 3), padding=(0, 1)))
    for count in (31, 32, 64, 65, 130):
        x = torch.randn(count, 3, 4, 6)
        x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
        assert_same_records(model, EvaF, lambda model, x=x: loss(model, x).backward())


@every
@pytest.mark.parametrize("shape", [(5, 6), (3, 4, 6), (2, 3, 4, 6), (6,), (200, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_layers(cls, shape, dtype):
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3, bias=False))
    x = torch.randn(shape).to(dtype).float()

    def backward(model):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
            out = model(x)
        out.float().square().mean().backward()

    assert_same_records(model, cls, backward)


@every
def test_rows_in_any_order_in_memory(cls):
    model = nn.Sequential(nn.Linear(6, 7, bias=False), nn.Tanh(), nn.Linear(7, 3))
    turned, cut = torch.randn(4, 6, 5).transpose(1, 2), torch.randn(9, 5, 12)[::2, 1:4, ::2]
    for x in (turned, cut):
        assert_same_records(model, cls, lambda model, x=x: loss(model, x).backward())


def test_transposed_convolutions():
    model = nn.Sequential(nn.ConvTranspose2d(4, 6, 3, 2, groups=2), nn.Tanh(), nn.ConvTranspose2d(6, 2, 2))
    x = torch.randn(3, 4, 5, 4)
    assert_same_records(model, EvaF, lambda model: loss(model, x).backward())


@every
def test_few_samples(cls):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 2))
    x = torch.randn(6, 3, 6, 5)
    assert_same_records(model, cls, lambda model: loss(model, x).backward(), samples=2)
    assert_same_records(model, cls, lambda model: loss(model, x).backward(), reference=True, lr=0.1, damping=0.1)


@every
def test_as_often_as_gradients_are(cls):
    model = make_mlp()
    x = torch.randn(6, model[0].in_features)

    def micro_batches(model):
        for part in x.split(2):
            loss(model, part).backward()

    def twice_through_one_graph(model):
        value = loss(model, x)
        value.backward(retain_graph=True)
        (3 * value).backward()

    def thrown_away(model):
        loss(model, x)
        loss(model, 2 * x).backward()
        loss(model, x)

    def both_at_once(model):
        (loss(model, x) + loss(model, -x)).backward()

    def recomputed(model):
        checkpoint(model, x, use_reentrant=False).square().mean().backward()

    for backward in (micro_batches, twice_through_one_graph, thrown_away, both_at_once, recomputed):
        assert_same_records(model, cls, backward)


class InPlace(nn.Module):
    """A layer whose output, or input, is changed in place after its call."""

    def __init__(self, layer, change):
        super().__init__()
        self.layer, self.change = layer, change

    def forward(self, x):
        x = x * 2
        y = self.layer(x)
        self.change(x, y)
        return y


def grow(x, _):
    x.mul_(3)


@every
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize(
    ("layer", "shape", "change"),
    [
        (nn.Linear(6, 7), (2, 5, 6), lambda _, y: y.relu_()),
        (nn.Linear(6, 7), (6,), lambda _, y: y.relu_()),
        (nn.Linear(6, 7), (2, 5, 6), lambda _, y: y[0].mul_(2)),
        (nn.Conv2d(3, 4, 3), (3, 6, 6), lambda _, y: y.relu_()),
        (nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), (2, 3, 6, 6), grow),
        (nn.Conv2d(3, 4, 2, padding="same"), (2, 3, 6, 6), grow),
    ],
)
def test_changes_in_place(cls, layer, shape, change):
    x = torch.randn(shape)
    assert_same_records(InPlace(layer, change), cls, lambda model: loss(model, x).backward())


@every
def test_an_input_that_is_turned_round_may_change(cls):
    x = torch.randn(2, 6, 5)

    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 7)

        def forward(self, x):
            x = x * 2
            y = self.layer(x.transpose(1, 2))
            x.mul_(3)
            return y

    assert_same_records(Turned(), cls, lambda model: loss(model, x).backward())


@every
def test_gradients_of_an_output_by_themselves_and_none_at_all(cls):
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 3, bias=False))
    x = torch.randn(5, 4)

    def in_two_halves(model):
        y = model[0](x)
        gradient, _ = torch.autograd.grad(loss(model[1], y), (y, model[1].weight))
        y.backward(gradient)

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, _):
            return None

    def without_gradient(model):
        (model(x).sum() + Nothing.apply(model[0](x)).sum()).backward()

    for backward in (in_two_halves, without_gradient):
        assert_same_records(model, cls, backward, samples=2)


@every
def test_other_default_types_and_negative_views(cls):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1, bias=False))
    x = torch.randn(2, 3, 5, 5)
    negative = torch.complex(torch.zeros_like(x), x).conj().imag

    def with_doubles(model):
        torch.set_default_dtype(torch.float64)
        try:
            loss(model, x).backward()
        finally:
            torch.set_default_dtype(torch.float32)

    for backward in (with_doubles, lambda model: loss(model, negative).backward()):
        assert_same_records(model, cls, backward)


@every
def test_two_graphs_whose_layers_are_alike(cls, monkeypatch):
    """A graph reads tables that eager backwards of another layer of that shape do not write."""
    model = nn.ModuleList([nn.Linear(4, 3, bias=False), nn.Linear(4, 3, bias=False)])
    optimizer = cls(model)
    x = torch.randn(5, 4)
    launches = []
    write = AddressTable.write

    def noted(self, *args, **options):
        launches.append(write(self, *args, **options))
        return launches[-1]

    monkeypatch.setattr(AddressTable, "write", noted)
    for head in model:
        loss(head, x).backward()
    launches.clear()
    set_capturing(monkeypatch, capturing=True)
    loss(model[0], x).backward()
    set_capturing(monkeypatch, capturing=False)
    read = [(table, table.clone()) for table in launches]
    optimizer.zero_grad()
    for head in model:
        loss(head, 2 * x).backward()
    assert read
    assert all(torch.equal(table, before) for table, before in read)


@every
def test_a_layer_that_is_called_twice_and_changed_in_place(cls):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 5, bias=False)

        def forward(self, x):
            return self.layer(torch.relu_(self.layer(x)))

    x = torch.randn(4, 5)
    assert_same_records(Twice(), cls, lambda model: loss(model, x).backward())


@every
def test_inputs_are_held_only_as_long_as_autograd_holds_them(cls):
    class Watching(nn.Module):
        """Notes whether its input is still there."""

        def forward(self, x):
            x = x * 2
            seen.append(ref(x))
            return x

    model = nn.Sequential(nn.Linear(4, 4), Watching(), nn.Linear(4, 3))
    optimizer = cls(model)
    x = torch.randn(5, 4)
    for use in (lambda: loss(model, x), lambda: loss(model, x).backward()):
        seen = []
        use()
        assert [one() for one in seen] == [None]
    optimizer.zero_grad()
    seen = []
    value = checkpoint(model, x, use_reentrant=False).square().mean()
    assert [one() for one in seen] == [None]
    value.backward()
    assert optimizer._capture._gpu_statistics._to_record == []


def test_nothing_of_an_optimizer_waits_for_the_garbage_collector():
    model = make_mlp()
    optimizer = EvaF(model)
    loss(model, torch.randn(5, model[0].in_features)).backward()
    optimizer.step()
    statistics, record = ref(optimizer._capture._gpu_statistics), ref(optimizer.state[model[0].weight]["record"])
    gc.collect()
    gc.disable()
    try:
        optimizer.detach()
        del optimizer, model
        assert statistics() is None
        assert record() is None
    finally:
        gc.enable()


def test_states_that_are_loaded_share_what_was_prepared():
    model = make_mlp()
    optimizer = EvaF(model)
    x = torch.randn(5, model[0].in_features)
    for _ in range(4):
        value = loss(model, x)
        optimizer.load_state_dict(optimizer.state_dict())
        value.backward()
        record = optimizer.state[model[0].weight]["record"]
        assert float(record[model[0].in_features]) == 5
        optimizer.zero_grad()
    assert len(optimizer._capture._gpu_statistics._batches) == 1


@every
def test_many_forwards_that_are_thrown_away(cls):
    model = make_mlp()
    optimizer = cls(model)
    for _ in range(200):
        loss(model, torch.randn(2, model[0].in_features))
    assert len(optimizer._capture._gpu_statistics._waiting) < 150


@every
def test_zero_grad_drops_what_was_caught_and_a_state_dict_has_it(cls):
    model = make_mlp()
    optimizer = cls(model)
    x = torch.randn(6, model[0].in_features)
    loss(model, x).backward()
    saved = optimizer.state_dict()
    assert any(float(state["record"].abs().sum()) > 0 for state in saved["state"].values() if "record" in state)
    loss(model, x).backward()
    optimizer.zero_grad()
    assert all(float(state["record"].abs().sum()) == 0 for state in optimizer.state.values() if "record" in state)


@every
def test_a_graph_that_is_captured_before_a_step_like_it(cls, monkeypatch):
    """There are no tables for it yet: sums are added up by torch's operations."""
    model = make_mlp()
    x = torch.randn(6, model[0].in_features)

    def backward(model):
        set_capturing(monkeypatch, capturing=True)
        loss(model, x).backward()

    ours = records_of(model, cls, backward, with_kernels=True)
    set_capturing(monkeypatch, capturing=False)
    stock = records_of(model, cls, lambda model: loss(model, x).backward(), with_kernels=False)
    for one, other in zip(ours, stock, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=5e-5)


def test_a_padding_mask_and_double_precision_go_without_kernels():
    model = make_mlp()
    optimizer = EvaF(model)
    x = torch.randn(2, 3, model[0].in_features)
    with optimizer.padding_mask(torch.ones(2, 3, dtype=torch.bool)):
        loss(model, x).backward()
    double = make_mlp().double()
    EvaF(double)
    loss(double, x.double()).backward()
    assert not any(calls)


@every
@pytest.mark.parametrize("options", [{}, {"samples": 2}])
@pytest.mark.parametrize("batch_first", [True, False])
def test_an_attentions_output_projection(cls, options, batch_first):
    torch.manual_seed(0)
    model = nn.MultiheadAttention(6, 2, batch_first=batch_first)
    x = torch.randn(5, 7, 6)
    turned = batch_first and bool(options)  # rows are put into another order, which kernels do not take
    assert_same_records(
        model, cls, lambda model: model(x, x, x)[0].square().mean().backward(), by_kernels=not turned, **options
    )


class Taken(nn.Module):
    """Two layers whose calls a test puts together."""

    def __init__(self, how):
        super().__init__()
        self.a, self.b, self.how = nn.Linear(5, 5), nn.Linear(5, 5), how

    def forward(self, x):
        return self.how(self, x)


@every
@pytest.mark.parametrize(
    "how",
    [
        lambda m, x: m.a(x) - m.a(100 + x).detach(),
        lambda m, x: m.b(torch.tanh(m.a(x))) + m.a(x * 2),
        lambda m, x: m.a(x) + torch.func.grad(lambda z: m.a(z).square().sum())(x),
        lambda m, x: m.b(torch.tanh(m.a(x)).detach()),
    ],
    ids=["detached", "twice", "transformed", "cut"],
)
def test_only_calls_that_a_gradient_passes(cls, how):
    x = torch.randn(4, 5)
    model = Taken(how)
    with watched():
        ours = records_of(model, cls, lambda m: loss(m, x).backward(), with_kernels=True)
    stock = records_of(model, cls, lambda m: loss(m, x).backward(), with_kernels=False)
    for one, other in zip(ours, stock, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=5e-5)


@every
def test_graphs_of_several_outputs_are_not_kept(cls):
    seen = []

    def how(model, x):
        hidden = torch.tanh(model.a(x))
        seen.append(ref(hidden))
        return hidden, model.b(hidden)

    model = Taken(how)
    optimizer = cls(model)
    for _ in range(3):
        sum(part.sum() for part in model(torch.randn(4, 5))).backward()
        model(torch.randn(4, 5))
    assert [reference() for reference in seen] == [None] * 6
    optimizer.step()


@every
def test_negative_views_and_layers_that_are_frozen_later(cls):
    model = Taken(lambda m, x: m.b(torch.tanh(m.a(x))))
    z = torch.randn(4, 5, dtype=torch.complex64)

    def backward(model):
        for x in (z.imag, z.conj().imag):
            loss(model, x).backward()
        model.a.requires_grad_(False)
        loss(model, z.real).backward()
        model.a.requires_grad_(True)

    assert_same_records(model, cls, backward)


class Mixed(nn.Module):
    """A norm in float32 in front of layers in bfloat16: autograd keeps a copy of their input, not the input.

    Without a bias the copy cannot be found.
    """

    def __init__(self, change=lambda _: None, *, bias=False):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=bias) for _ in range(3))
        self.change = change

    def forward(self, x):
        for norm, layer in zip(self.norms, self.layers, strict=True):
            given = norm(x).bfloat16().float()
            with torch.autocast("cpu", torch.bfloat16):
                x = x + layer(given)
            self.change(given)
        return x


@pytest.mark.parametrize("bound", [1, 300, 1 << 20])
@pytest.mark.parametrize("change", [lambda _: None, lambda given: given.detach().mul_(3)], ids=["left", "changed"])
def test_inputs_that_autograd_does_not_keep(bound, change, monkeypatch):
    """Inputs that are always changed in place are found out, and then added up before that."""
    monkeypatch.setattr(gpu_statistics, "_MAX_RETAINED_BYTES", bound)
    x = torch.randn(5, 8)
    for count in (1, 2, 3):
        rounds[0] = count
        assert_same_records(Mixed(change), EvaF, lambda model: loss(model, x).backward())


@pytest.mark.parametrize("change", [lambda _: None, lambda given: given.detach().mul_(3)], ids=["left", "changed"])
def test_copies_that_autocast_has_made_are_read_in_place_of_inputs(change, monkeypatch):
    """Layers were applied to them, whatever becomes of the inputs; nothing is retained for them."""
    monkeypatch.setattr(gpu_statistics, "_MAX_RETAINED_BYTES", -1)
    monkeypatch.setattr(gpu_statistics.LayerCall, "sum_alone", lambda _: pytest.fail("added up by itself"))
    x = torch.randn(4, 5, 8)
    assert_same_records(Mixed(change, bias=True), EvaF, lambda model: loss(model, x).backward())


@pytest.mark.parametrize("samples", [None, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_copies_of_convolutions_and_of_some_samples(samples, dtype):
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Flatten(2), nn.Linear(16, 5), nn.Linear(5, 2))
    x = torch.randn(6, 3, 4, 4).to(dtype).float()

    def backward(model):
        with torch.autocast("cpu", dtype):
            out = model(x)
        out.float().square().mean().backward()

    assert_same_records(model, EvaF, backward, samples=samples)


@every
def test_backwards_that_give_the_weight_nothing(cls):
    """Neither the attack on an input nor a call with other weights counts."""
    model = make_mlp()
    x = torch.randn(5, model[0].in_features, requires_grad=True)

    def backward(model):
        torch.autograd.grad(loss(model, x), x)
        others = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
        torch.func.functional_call(model, others, (x,)).sum().backward()
        value = loss(model, x)
        torch.autograd.grad(value, x, retain_graph=True)
        value.backward()

    assert_same_records(model, cls, backward)
    optimizer = cls(model)
    backward(model)
    assert [int(optimizer.state[layer.weight]["record"][layer.in_features]) for layer in model[::2]] == [5, 5, 5]


def test_an_adapter_behind_a_layer_has_an_input_of_its_own():
    model, adapter = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)), nn.Linear(6, 6)
    model[0].register_forward_hook(lambda *given: adapter(given[-1]))
    x = (torch.randn(5, 6) + 3).bfloat16().float()

    def backward(model):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        out.float().square().mean().backward()

    assert_same_records(model, EvaF, backward)


def test_an_input_that_is_changed_now_and_then_is_left_out_and_not_trusted_again():
    model = Mixed()
    optimizer = EvaF(model)
    x = torch.randn(5, 8)
    counts = []
    for change in (False, False, True, False, True):
        model.change = (lambda given: given.detach().mul_(3)) if change else (lambda _: None)
        loss(model, x).backward()
        counts.append([int(optimizer.state[layer.weight]["record"][8]) for layer in model.layers])
        optimizer.zero_grad()
    assert counts == [[5, 5, 5], [5, 5, 5], [0, 0, 0], [5, 5, 5], [5, 5, 5]]


def test_another_thread_evaluates_meanwhile():
    model = make_mlp()
    x = torch.randn(6, model[0].in_features)

    def backward(model):
        for _ in range(5):
            loss(model, x).backward()

    def evaluate(stop):
        with torch.no_grad():
            while not stop.wait(0.001):
                model(x)

    stop = Event()
    thread = Thread(target=evaluate, args=(stop,))
    thread.start()
    try:
        assert_same_records(model, EvaF, backward)
    finally:
        stop.set()
        thread.join()


def test_a_forward_that_is_interrupted():
    class Stops(nn.Module):
        def forward(self, x):
            raise KeyboardInterrupt

    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3), Stops())
    x = torch.randn(4, 5)

    def backward(model):
        with pytest.raises(KeyboardInterrupt):
            model(x)
        loss(model[:3], x).backward()

    assert_same_records(model, EvaF, backward)
