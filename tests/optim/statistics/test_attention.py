"""Both projections of nn.MultiheadAttention, against means of what they are applied to, in every way it is run."""

import copy
import logging
import pickle
import threading
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import gradweave
from gradweave._compat.dispatch import EveryCall
from gradweave._compat.functions import function_modes
from gradweave._logging import _log_once
from gradweave._runtime import buckets
from gradweave._runtime.split_calls import mode as split_mode
from gradweave.errors import GradweaveError
from gradweave.optim import Eva, EvaF
from gradweave.optim.statistics import attention
from optim.models import train as train_on
from optim.models import weights

WIDTH, HEADS, BATCH, LENGTH = 6, 2, 3, 4


def make(**options):
    torch.manual_seed(0)
    options = {"batch_first": True, "dtype": torch.float64, **options}
    module = nn.MultiheadAttention(WIDTH, HEADS, **options)
    for p in module.parameters():
        nn.init.normal_(p, std=0.5)
    return module


def batch(length=LENGTH, width=WIDTH, seed=1, dtype=torch.float64):
    return torch.randn(BATCH, length, width, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def loss_of(module, x, **options):
    return module(x, x, x, **options)[0].square().sum()


def record(optimizer, module):
    return optimizer.state[module.out_proj.weight]["record"]


def sums(optimizer, module):
    return record(optimizer, module)[:WIDTH]


def by_hand(module, query, key, value, *, mask=None):
    """What the projection is applied to: samples, positions, channels; one head and one position at a time."""
    if module.in_proj_weight is None:
        matrices = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
    else:
        matrices = module.in_proj_weight.chunk(3)
    biases = [0, 0, 0] if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    q, k, v = (x @ w.T + b for x, w, b in zip((query, key, value), matrices, biases, strict=True))
    size = WIDTH // HEADS
    result = torch.zeros_like(q)
    for sample in range(len(q)):
        for head in range(HEADS):
            columns = slice(head * size, (head + 1) * size)
            for place in range(q.shape[1]):
                scores = k[sample, :, columns] @ q[sample, place, columns] / size**0.5
                if mask is not None:
                    scores = scores.masked_fill(mask[sample, place], float("-inf"))
                result[sample, place, columns] = scores.softmax(0) @ v[sample, :, columns]
    return result.detach()


def applied_to(module, *args, **options):
    """The same by torch: what comes out if the projection is the identity."""
    other = copy.deepcopy(module)
    nn.init.eye_(other.out_proj.weight)
    if other.out_proj.bias is not None:
        nn.init.zeros_(other.out_proj.bias)
    return other(*args, **options)[0].detach()


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"batch_first": False}, {"bias": False}, {"kdim": 5, "vdim": 3}, {"kdim": 5, "batch_first": False}]
)
def test_input_vectors_are_means_of_what_it_is_applied_to(options, masked, need_weights):
    module = make(**options)
    stock = copy.deepcopy(module)
    query, key, value = batch(), batch(5, options.get("kdim", WIDTH), 2), batch(5, options.get("vdim", WIDTH), 3)
    given, mask = {"need_weights": need_weights}, None
    if masked:
        padded = torch.zeros(BATCH, 5, dtype=torch.bool)
        padded[1, 3:] = True
        causal = torch.ones(LENGTH, 5, dtype=torch.bool).triu(2)
        mask = padded[:, None] | causal
        given |= {"key_padding_mask": padded, "attn_mask": causal}
    x = by_hand(module, query, key, value, mask=mask)
    args = [t if module.batch_first else t.transpose(0, 1) for t in (query, key, value)]
    optimizer = EvaF(module, lr=0.0)
    y, expected = module(*args, **given), stock(*args, **given)
    assert torch.equal(y[0], expected[0])
    assert y[1] is expected[1] or torch.equal(y[1], expected[1])
    y[0].square().sum().backward()
    expected[0].square().sum().backward()
    for p, q in zip(module.parameters(), stock.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    assert torch.allclose(sums(optimizer, module), x.sum((0, 1)))
    assert record(optimizer, module)[WIDTH] == BATCH * LENGTH
    optimizer.step()
    assert torch.allclose(optimizer.state[module.out_proj.weight]["input_vector"][0], x.mean((0, 1)))


@pytest.mark.parametrize(
    "options", [{"add_bias_kv": True}, {"add_zero_attn": True}, {"dropout": 0.5}, {"bias": False, "kdim": 4}]
)
def test_other_options(options):
    module = make(**options)
    x, other = batch(), batch(7, options.get("kdim", WIDTH), 2)
    args = (x, other, batch(7, seed=3))
    torch.manual_seed(3)
    expected = applied_to(module, *args)
    torch.manual_seed(3)
    optimizer = EvaF(module)
    module(*args)[0].sum().backward()
    assert torch.allclose(sums(optimizer, module), expected.sum((0, 1)))


def test_inputs_without_a_batch_and_by_name():
    module = make()
    optimizer = EvaF(module, samples=2)
    x = batch()[0]
    module(query=x, key=x, value=x)[0].sum().backward()
    assert torch.allclose(sums(optimizer, module), applied_to(module, x, x, x)[:2].sum(0))
    assert record(optimizer, module)[WIDTH] == 2


@pytest.mark.parametrize("batch_first", [True, False])
def test_padding_and_slices_of_a_batch_are_those_of_the_modules_input(batch_first):
    module = make(batch_first=batch_first)
    stock = copy.deepcopy(module)
    x = batch()
    mask = torch.rand(x.shape[:2]) > 0.4
    applied = applied_to(module, x, x, x)
    optimizer = EvaF(module)
    with optimizer.padding_mask(mask):
        loss_of(module, x).backward()
    assert torch.allclose(sums(optimizer, module), applied[mask].sum(0))
    assert record(optimizer, module)[WIDTH] == mask.sum()
    loss_of(stock, x).backward()
    for p, q in zip(module.parameters(), stock.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    optimizer.detach()
    optimizer = Eva(module, faithful=True, samples=1)
    y = module(x, x, x)[0]
    y.retain_grad()
    y.square().sum().backward()
    assert torch.allclose(sums(optimizer, module), applied[0].sum(0))
    assert torch.allclose(record(optimizer, module)[WIDTH + 1 :], y.grad[0].sum(0) * len(x))


class Twice(nn.Module):
    """Two attentions of one projection, which is also called as the layer that it is, and each of them twice."""

    def __init__(self):
        super().__init__()
        self.one, self.other = make(), make(batch_first=False)
        self.other.out_proj = self.one.out_proj

    def forward(self, x):
        x = self.one(x, x, x, need_weights=False)[0]
        x = self.other(x, x, x)[0]
        x = self.one(x, x, x)[0]
        return self.one.out_proj(x)


def test_shared_modules_and_projections_add_up():
    model, expected = Twice(), 0
    x = first = batch()
    for module in (model.one, model.other, model.one):
        expected = expected + applied_to(module, x, x, x).sum((0, 1))
        x = module(x, x, x)[0].detach()
    expected = expected + x.sum((0, 1))
    optimizer = EvaF(model)
    model(first).sum().backward()
    assert torch.allclose(sums(optimizer, model.one), expected)
    assert record(optimizer, model.one)[WIDTH] == 4 * BATCH * LENGTH


def test_micro_batches_add_up_and_evaluations_do_not():
    module = make()
    optimizer = EvaF(module)
    x = batch()
    loss_of(module, x).backward()
    whole = record(optimizer, module).clone()
    optimizer.zero_grad()
    for part in x.split(1):
        loss_of(module, part).backward()
        loss_of(module, part)
        with torch.no_grad():
            loss_of(module, part)
    assert torch.allclose(record(optimizer, module), whole)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_counts_once(reentrant):
    x = batch()
    found = []
    for recomputed in (False, True):
        module = make()
        optimizer = EvaF(module)
        other = x.clone().requires_grad_()

        def run(x, module=module):
            return module(x, x, x, need_weights=False)[0]

        y = checkpoint(run, other, use_reentrant=reentrant) if recomputed else run(other)
        y.square().sum().backward()
        found.append([record(optimizer, module), *(p.grad for p in module.parameters())])
        assert not function_modes()
    assert record(optimizer, module)[WIDTH] == BATCH * LENGTH
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_keeps_vectors_in_float32_and_results_as_they_are(dtype):
    module = make(dtype=torch.float32)
    stock = copy.deepcopy(module)
    optimizer = EvaF(module)
    x = batch(dtype=torch.float32)
    outputs = []
    for one in (module, stock):
        with torch.autocast("cpu", dtype):
            y = one(x, x, x, need_weights=False)[0]
        y.float().square().sum().backward()
        outputs.append(y)
    assert torch.equal(*outputs)
    for p, q in zip(module.parameters(), stock.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    assert record(optimizer, module).dtype == torch.float32
    assert torch.allclose(sums(optimizer, module), applied_to(module, x, x, x).sum((0, 1)), atol=0.2)


def test_the_fast_path_is_taken_without_gradients():
    module = make(dtype=torch.float32).eval()
    optimizer = EvaF(module)
    x = batch(dtype=torch.float32)

    def is_fast():
        seen = []
        with EveryCall(lambda func, *_: seen.append(str(func))):
            module(x, x, x)
        return any("_native_multi_head_attention" in name for name in seen)

    assert not is_fast()
    with torch.no_grad():
        assert is_fast()
    with torch.inference_mode():
        assert is_fast()
    module.requires_grad_(False)
    assert is_fast()
    assert record(optimizer, module).count_nonzero() == 0


def test_a_frozen_projection_is_left_alone():
    module = make()
    module.out_proj.requires_grad_(False)
    optimizer = EvaF(module)
    loss_of(module, batch()).backward()
    assert not any(p is module.out_proj.weight for p in optimizer.state)
    module = make()
    optimizer = EvaF(module)
    module.out_proj.weight.requires_grad_(False)
    loss_of(module, batch()).backward()
    assert record(optimizer, module).count_nonzero() == 0


class OwnForward(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x)


def test_what_is_left_out():
    odd, tied, other = OwnForward(WIDTH, HEADS), make(), make()
    other.out_proj.weight = tied.out_proj.weight
    weighted = make()
    nn.utils.parametrizations.weight_norm(weighted.out_proj)
    model = nn.ModuleList([nn.Linear(3, 3), odd, tied, other, weighted])
    optimizer = EvaF(model)
    covered = {id(p) for p in optimizer.param_groups[0]["params"]}
    left_out = [odd.out_proj.weight, tied.out_proj.weight, *weighted.out_proj.parametrizations.parameters()]
    assert not covered & set(map(id, left_out))
    assert id(tied.in_proj_weight) in covered
    odd(batch(dtype=torch.float32))[0].sum().backward()
    loss_of(weighted, batch()).backward()


def test_copies_have_no_part_in_it():
    module = make()
    optimizer = EvaF(module)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        loss_of(other, batch()).backward()
        assert torch.equal(other(*[batch()] * 3)[0], module(*[batch()] * 3)[0])
    assert record(optimizer, module).count_nonzero() == 0
    found = record(optimizer, module)
    optimizer.detach()
    loss_of(module, batch()).backward()
    assert found.count_nonzero() == 0
    assert not module._forward_hooks
    assert not module._forward_pre_hooks
    assert not module.out_proj._forward_hooks


def test_failures_leave_nothing_behind():
    module = make()
    optimizer = EvaF(module)
    with pytest.raises(AssertionError):
        module(*[torch.randn(BATCH, LENGTH, WIDTH + 1, dtype=torch.float64)] * 3)
    assert not function_modes()

    def fail(*_):
        raise ValueError("a hook")

    for register in (module.register_forward_pre_hook, module.register_forward_hook):
        handle = register(fail)
        with pytest.raises(ValueError, match="a hook"):
            loss_of(module, batch())
        handle.remove()
        assert not function_modes()
    module.out_proj.weight = nn.Parameter(torch.zeros(7, WIDTH, dtype=torch.float64))
    module.out_proj.bias = nn.Parameter(torch.zeros(7, dtype=torch.float64))
    with pytest.raises(GradweaveError, match=r"\(7, 6\), which was \(6, 6\)"):
        loss_of(module, batch())
    assert not function_modes()
    del optimizer


def test_what_an_interrupt_leaves_behind_is_gone_with_the_next_forward():
    module = make()
    optimizer = EvaF(module)

    def interrupt(*_):
        raise KeyboardInterrupt

    for grad in (False, True):
        handle = module.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            loss_of(module, batch())
        handle.remove()
        assert len(function_modes()) == 1
        with torch.set_grad_enabled(grad):
            loss = loss_of(module, batch())
        assert not function_modes()
    loss.backward()
    assert record(optimizer, module)[WIDTH] == BATCH * LENGTH


def test_threads():
    module = make()
    optimizer = EvaF(module)
    losses, together = [], threading.Barrier(4)
    expected = sum(applied_to(module, *[batch(seed=seed)] * 3).sum((0, 1)) for seed in range(4))

    def run(seed):
        together.wait()
        for _ in range(5):
            loss = loss_of(module, batch(seed=seed))
        losses.append((loss, function_modes()))

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not any(modes for _, modes in losses)
    sum(loss for loss, _ in losses).backward()
    assert torch.allclose(sums(optimizer, module), expected)


def test_function_transforms_are_left_alone():
    module = make()
    optimizer = EvaF(module)
    params = dict(module.named_parameters())

    def loss(params, x):
        return torch.func.functional_call(module, params, (x, x, x), {"need_weights": True})[0].square().sum()

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, batch())
    assert gradients["out_proj.weight"].shape == (BATCH, WIDTH, WIDTH)
    assert record(optimizer, module).count_nonzero() == 0
    loss({name: p * 2 for name, p in params.items()}, batch()).backward()
    assert record(optimizer, module)[WIDTH] == BATCH * LENGTH


def test_double_backward_goes_through():
    found = []
    for watched in (False, True):
        module = make()
        if watched:
            optimizer = EvaF(module)
        x = batch().requires_grad_()
        (gradient,) = torch.autograd.grad(loss_of(module, x), x, create_graph=True)
        gradient.square().sum().backward()
        found.append(module.out_proj.weight.grad)
    assert torch.equal(*found)
    del optimizer


class Looking(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_an_attention_that_another_mode_looks_at_is_left_to_it(caplog):
    caplog.set_level(logging.INFO, logger="gradweave")
    _log_once.cache_clear()
    module = make()
    optimizer = EvaF(module)
    for _ in range(2):
        with Looking() as mode:
            loss_of(module, batch()).backward()
        assert F.multi_head_attention_forward in mode.seen
        assert F.linear not in mode.seen
    assert record(optimizer, module).count_nonzero() == 0
    assert sum("another torch-function mode" in message for message in caplog.messages) == 1
    gradient = module.out_proj.weight.grad
    optimizer.step()
    assert gradient.isfinite().all()
    assert optimizer.state[module.out_proj.weight]["input_vector"].count_nonzero() == 0


def test_a_default_device_is_no_obstacle():
    module = make()
    optimizer = EvaF(module)
    with torch.device("cpu"):
        loss_of(module, batch()).backward()
    assert torch.allclose(sums(optimizer, module), applied_to(module, *[batch()] * 3).sum((0, 1)))
    assert not function_modes()


def test_modes_that_are_entered_inside_stay():
    module, looking = make(), Looking()
    optimizer = EvaF(module)
    handles = [
        module.register_forward_pre_hook(lambda *_: looking.__enter__() and None),
        module.register_forward_hook(lambda *_: looking.__exit__(None, None, None)),
    ]
    loss_of(module, batch()).backward()
    assert F.multi_head_attention_forward in looking.seen
    assert not function_modes()
    assert record(optimizer, module)[WIDTH] == BATCH * LENGTH
    assert len(handles) == 2


class Net(nn.Module):
    """Torch's own transformer layers, with what comes before and after them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, WIDTH)
        self.encoder = nn.TransformerEncoderLayer(WIDTH, HEADS, 8, dropout=0.0, batch_first=True)
        self.decoder = nn.TransformerDecoderLayer(WIDTH, HEADS, 8, dropout=0.0, batch_first=True)
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x):
        x = self.first(x)
        return self.last(self.decoder(x, self.encoder(x)))

    def attentions(self):
        return [module for module in self.modules() if isinstance(module, nn.MultiheadAttention)]


class Small(Net):
    """One attention between two layers: for compilers that take their time."""

    def __init__(self):
        nn.Module.__init__(self)
        torch.manual_seed(0)
        self.first = nn.Linear(5, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x):
        x = self.first(x)
        return self.last(self.attention(x, x, x, need_weights=False)[0])


def break_graphs(model):
    """Has compilers stop in the midst of an attention, before and after what it computes."""
    model.encoder.self_attn.register_forward_pre_hook(lambda *_: torch._dynamo.graph_break())
    model.decoder.self_attn.register_forward_hook(lambda *_: torch._dynamo.graph_break(), prepend=True)


def net_loss(model, x):
    return (model(x) - 1).square().mean()


def train(model, optimizer, *, run=None, steps=4):
    for step in range(steps):
        x = batch(width=5, seed=step, dtype=torch.float32)
        net_loss(model if run is None else run, x).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def input_vectors(model, optimizer):
    return [optimizer.state[module.out_proj.weight]["input_vector"] for module in model.attentions()]


@pytest.mark.parametrize("cls", [Eva, EvaF])
def test_reorder(cls, monkeypatch):
    alone, beside = Net(), Net()
    optimizer, other = cls(alone), cls(beside)
    expected = train(alone, optimizer)
    seen, real = [], split_mode.split_linear
    monkeypatch.setattr(split_mode, "split_linear", lambda *args: (seen.append(1), real(*args))[1])
    with gradweave.reorder(beside, policy="side_stream"):
        assert torch.equal(train(beside, other, steps=4), expected)
    assert len(seen) == 4 * (6 + 2 + 2 + 3)  # linear layers, attention to itself, twice, and to another
    for one, two in zip(input_vectors(alone, optimizer), input_vectors(beside, other), strict=True):
        assert one.count_nonzero() > 0
        assert torch.equal(one, two)


@pytest.mark.parametrize("first", ["reorder", "optimizer"])
def test_reorder_of_the_attention_itself(first):
    alone, beside = make(), make()
    optimizer = EvaF(alone)
    loss_of(alone, batch()).backward()
    if first == "optimizer":
        other = EvaF(beside)
    with gradweave.reorder(beside, policy="side_stream"):
        if first == "reorder":
            other = EvaF(beside)
        loss_of(beside, batch()).backward()
    assert not function_modes()
    assert torch.equal(record(optimizer, alone), record(other, beside))
    for p, q in zip(alone.parameters(), beside.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("cls", [Eva, EvaF])
def test_fusion_in_forward(cls, monkeypatch):
    monkeypatch.setattr(buckets, "CPU_BUCKET_BYTES", {"forward": 1, "backward": 1})
    alone, beside = Net(), Net()
    optimizer, other = cls(alone, foreach=True), cls(beside, foreach=True)
    expected = train(alone, optimizer)
    with gradweave.fuse(beside, other, "forward"):
        train(beside, other)
    assert torch.equal(weights(beside), expected)
    for one, two in zip(input_vectors(alone, optimizer), input_vectors(beside, other), strict=True):
        assert torch.equal(one, two)


compiling = pytest.mark.filterwarnings("ignore:.*should not be instantiated", "ignore:The .grad attribute of a Tensor")


@compiling
@pytest.mark.parametrize(
    ("cls", "backend", "whole"),
    [(Eva, "aot_eager", True), (EvaF, "aot_eager", True), (EvaF, "inductor", True), (EvaF, "aot_eager", False)],
)
def test_torch_compile(cls, backend, whole):
    torch._dynamo.reset()
    make_model = Small if backend == "inductor" else Net
    plain, model = make_model(), make_model()
    optimizer, other = cls(plain), cls(model)
    expected = train(plain, optimizer)
    if not whole:
        break_graphs(model)
    run = torch.compile(model, backend=backend, fullgraph=whole)
    assert torch.allclose(train(model, other, run=run), expected, atol=1e-4)
    assert not function_modes()
    for one, two in zip(input_vectors(plain, optimizer), input_vectors(model, other), strict=True):
        assert two.count_nonzero() > 0
        assert torch.allclose(one, two, atol=1e-4)


@compiling
@pytest.mark.parametrize("traced", [True, False])
def test_a_forward_that_is_compiled_without_its_hooks(traced, monkeypatch):
    torch._dynamo.reset()
    if not traced:
        monkeypatch.setattr(attention, "traces_entered_modes", lambda: False)
    module = make()
    optimizer = EvaF(module)
    module.forward = torch.compile(module.forward, backend="aot_eager", fullgraph=True)
    x = batch()
    module(x, x, x)[0].square().sum().backward()
    assert not function_modes()
    del module.forward
    assert record(optimizer, module)[WIDTH] == (BATCH * LENGTH if traced else 0)


@compiling
def test_compiled_forwards_of_other_shapes_with_masks_and_without_gradients():
    torch._dynamo.reset()
    module = make(dtype=torch.float32)
    optimizer = EvaF(module)
    run = torch.compile(module, backend="aot_eager", fullgraph=True)
    for length in (4, 5, 7):
        x = batch(length, dtype=torch.float32)
        mask = torch.rand(x.shape[:2]) > 0.4
        with torch.no_grad():
            run(x, x, x)
        with optimizer.padding_mask(mask):
            loss_of(run, x).backward()
        assert torch.allclose(sums(optimizer, module), applied_to(module, x, x, x)[mask].sum(0), atol=1e-5)
        optimizer.zero_grad()


@compiling
def test_a_compiler_that_cannot_trace_it_sees_nothing_of_it(monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="gradweave")
    _log_once.cache_clear()
    torch._dynamo.reset()
    monkeypatch.setattr(attention, "traces_entered_modes", lambda: False)
    model = Net()
    optimizer = EvaF(model)
    assert sum("in compiled models" in message for message in caplog.messages) == 1
    train(model, optimizer, run=torch.compile(model, backend="aot_eager", fullgraph=True), steps=1)
    assert not any(vector.count_nonzero() for vector in input_vectors(model, optimizer))
    train(model, optimizer, steps=1)
    assert all(vector.count_nonzero() for vector in input_vectors(model, optimizer))


@compiling
@pytest.mark.parametrize(("cls", "exact"), [(Eva, True), (EvaF, True), (EvaF, False)])
def test_whole_steps(cls, exact):
    make_model = Net if exact else Small
    model, other = make_model(), make_model()
    optimizer, stock = cls(model, foreach=False), cls(other, foreach=False)
    step = gradweave.compile(model, net_loss, optimizer, **({"lower": "replay"} if exact else {}))
    for number in range(3):
        step(batch(width=5, seed=number, dtype=torch.float32))
    expected = train(other, stock, steps=3)
    assert torch.equal(weights(model), expected) if exact else torch.allclose(weights(model), expected, atol=1e-4)
    for one, two in zip(input_vectors(model, optimizer), input_vectors(other, stock), strict=True):
        assert one.count_nonzero() > 0
        assert torch.allclose(one, two, atol=1e-5)


def test_steps_resume_from_a_state_dict():
    model, other = Net(), Net()
    optimizer = Eva(model)
    train(model, optimizer, steps=2)
    resumed = Eva(other)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert torch.equal(train(model, optimizer), train(other, resumed))


def make_narrow(bias=True, **options):
    torch.manual_seed(0)
    return nn.MultiheadAttention(6, 2, bias=bias, batch_first=True, **options)


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("cross", [True, False])
def test_input_vectors_are_means_of_queries_keys_and_values(by_name, cross):
    module = make_narrow()
    optimizer = EvaF(module, lr=0.0)
    query = torch.randn(3, 4, 6)
    key = torch.randn(3, 7, 6) if cross else query
    value = torch.randn(3, 7, 6) if cross else query
    called = module(query=query, key=key, value=value) if by_name else module(query, key, value)
    called[0].sum().backward()
    optimizer.step()
    vectors = optimizer.state[module.in_proj_weight]["input_vector"]
    expected = torch.stack([x.mean((0, 1)) for x in (query, key, value)])
    assert torch.allclose(vectors, expected, atol=1e-6)
    (covered,) = optimizer.param_groups
    assert sorted(p.shape for p in covered["params"]) == [(6,), (6, 6), (18,), (18, 6)]


def test_what_stays_with_the_first_order_rule():
    for options, covered in (({"kdim": 5, "vdim": 5}, 2), ({"bias": False}, 2), ({}, 4)):
        attention = make_narrow(**options)
        module = nn.Sequential(nn.Linear(6, 6), attention)
        optimizer = Eva(module)
        rest = len(list(attention.parameters())) - covered
        assert [len(group["params"]) for group in optimizer.param_groups] == [2 + covered, *([rest] if rest else [])]
        assert any(p is attention.out_proj.weight for p in optimizer.param_groups[0]["params"])
    module = nn.Sequential(nn.Linear(6, 6), make_narrow())
    optimizer = Eva(module, reference=True)
    assert len(optimizer.param_groups[0]["params"]) == 2


def mean_loss(model, x):
    return (model(x) - 1).square().mean()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
@pytest.mark.parametrize("cls", [Eva, EvaF])
def test_encoder_layers_train_and_compile_as_one_graph(cls):
    torch._dynamo.reset()
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        optimizer = cls(model, lr=0.01)
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        losses = train_on(run, optimizer, [torch.ones(3, 4, 6).cumsum(1).cos()] * 8, loss=mean_loss)
        results.append(weights(model))
    assert losses[-1] < losses[0]
    assert torch.allclose(results[0], results[1], atol=1e-4)


@pytest.mark.parametrize("padded", [True, False])
def test_an_attention_without_any_keys(padded):
    """Nothing is divided by none: keys and values give zeros, and queries count unless they are padding too."""
    module = nn.MultiheadAttention(4, 2, batch_first=True)
    optimizer = EvaF(module)
    q, k = torch.randn(1, 3, 4), torch.randn(1, 3 if padded else 0, 4)
    mask = torch.zeros(1, 3, dtype=torch.bool)
    with optimizer.padding_mask(mask) if padded else nullcontext():
        module(q, k, k.clone())[0].sum().backward()
    seen = [0.0] * 4 + [0.0] if padded else [*q.sum((0, 1)).tolist(), 3.0]
    record = optimizer.state[module.in_proj_weight]["record"].tolist()
    assert record[:4] + record[-1:] == pytest.approx(seen)
    assert record[4:-1] == [0.0] * 8


def test_an_attention_whose_mask_has_weights():
    module = nn.MultiheadAttention(4, 2, batch_first=True)
    optimizer = EvaF(module)
    q, k = torch.randn(1, 3, 4), torch.randn(1, 3, 4)
    context = optimizer.padding_mask(torch.full((1, 3), 0.1))
    with context, context:
        module(q, k, k)[0].sum().backward()
    assert optimizer._capture.masking.mask is None
    record = optimizer.state[module.in_proj_weight]["record"]
    assert torch.allclose(record[4:8] / record[-1], k.mean((0, 1)), atol=1e-5)
