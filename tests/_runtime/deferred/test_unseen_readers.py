"""Weights that are read without a call from Python are updated: by other processes, C++, aliases, compilers."""

import copy
import logging

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

from _runtime.deferred.comparison import LONG, pending, same, train
from fusion.loops import adamw, announce_again, assert_same, batches, loss_of, make_net
from gradweave._runtime import buckets
from gradweave.errors import GradweaveError
from gradweave.fusion import fuse


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
    """It reads weights from then on without a call from Python."""
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
    assert "call torch.compile() first, and give fuse() the compiled model" in explained


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


class Attending(nn.Module):
    """A Transformer's encoder, whose evaluation has a fast path for weights that are plain parameters."""

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
def test_evaluation_after_step_goes_the_way_that_torch_goes():
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
