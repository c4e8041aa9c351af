"""Recurrent layers in a graph: stock's result bit for bit in a replay, to rounding from Inductor."""

import pytest
import torch
from torch import nn

from compiler.models import adamw, assert_identical, both
from gradweave._compat import tracing


class Sequences(nn.Module):
    """A recurrent layer and a head for each of its outputs."""

    def __init__(self, kind, *, batch_first=True, **options):
        super().__init__()
        self.inner = kind(6, 8, batch_first=batch_first, **options)
        width = (self.inner.proj_size or 8) * (2 if self.inner.bidirectional else 1)
        self.head = nn.Linear(width, 3)

    def forward(self, x, *hidden):
        out, last = self.inner(x, *(hidden if len(hidden) < 2 else [hidden]))
        return self.head(out), last


def mean_square(model, *batch):
    out, last = model(*batch)
    return out.square().mean() + (last if torch.is_tensor(last) else last[1]).square().mean()


def data(*hidden, steps=4, count=4):
    generator = torch.Generator().manual_seed(1)
    shapes = [(3, steps, 6), *((layers, 3, width) for layers, width in hidden)]
    return [tuple(torch.randn(shape, generator=generator) for shape in shapes) for _ in range(count)]


LAYERS = {
    "LSTM": (nn.LSTM, {}, data()),
    "GRU": (nn.GRU, {}, data()),
    "RNN": (nn.RNN, {}, data()),
    "RNN, relu": (nn.RNN, {"nonlinearity": "relu"}, data()),
    "LSTM, bidirectional": (nn.LSTM, {"bidirectional": True}, data()),
    "GRU, bidirectional, two layers": (nn.GRU, {"bidirectional": True, "num_layers": 2}, data()),
    "LSTM, two layers": (nn.LSTM, {"num_layers": 2}, data()),
    "LSTM, projected": (nn.LSTM, {"proj_size": 5}, data()),
    "LSTM, dropout between layers": (nn.LSTM, {"num_layers": 2, "dropout": 0.3}, data()),
    "GRU, dropout between layers": (nn.GRU, {"num_layers": 2, "dropout": 0.3}, data()),
    "LSTM, time first": (nn.LSTM, {"batch_first": False}, data()),
    "GRU, without bias": (nn.GRU, {"bias": False}, data()),
    "LSTM, given a state": (nn.LSTM, {}, data((1, 8), (1, 8))),
    "GRU, given a state": (nn.GRU, {}, data((1, 8))),
    "LSTM, everything": (
        nn.LSTM, {"proj_size": 5, "num_layers": 2, "bidirectional": True}, data((4, 5), (4, 8)),
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("name", LAYERS)
def test_a_replay_is_the_eager_step_bit_for_bit(name, warned):
    kind, options, batches = LAYERS[name]
    made, expected, step = both(lambda: Sequences(kind, **options), mean_square, batches, make_optimizer=adamw)
    assert_identical(made, expected)
    assert step.eager_reason is None
    assert not warned()


IN_INDUCTOR = {
    "LSTM": (nn.LSTM, {}, data(steps=2)),
    "GRU, bidirectional, given a state": (nn.GRU, {"bidirectional": True}, data((2, 8), steps=2)),
}


@pytest.mark.parametrize("name", IN_INDUCTOR)
def test_inductor_compiles_it_step_by_step(name, warned):
    kind, options, batches = IN_INDUCTOR[name]
    made, expected, step = both(
        lambda: Sequences(kind, **options), mean_square, batches, "inductor", make_optimizer=adamw
    )
    torch.testing.assert_close(made[2], expected[2], rtol=1e-5, atol=1e-7)
    assert step.eager_reason is None
    assert not warned()


def with_flat_weights():
    """A layer whose weights are views of one buffer, as ``flatten_parameters`` makes them for cuDNN."""
    model = Sequences(nn.GRU)
    weights = list(model.inner.parameters())
    buffer = torch.cat([p.detach().flatten() for p in weights])
    for p, part in zip(weights, buffer.split([p.numel() for p in weights]), strict=True):
        p.data = part.view_as(p)
    assert len({p.untyped_storage().data_ptr() for p in weights}) == 1
    return model


@pytest.mark.parametrize("lower", ["replay", "inductor"])
def test_weights_that_are_views_of_one_buffer_stay_that(lower, warned):
    made, expected, step = both(with_flat_weights, mean_square, data(steps=2), lower, make_optimizer=adamw)
    if lower == "replay":
        assert_identical(made, expected)
    torch.testing.assert_close(made[2], expected[2], rtol=1e-5, atol=1e-7)
    assert len({p.untyped_storage().data_ptr() for p in made[0].inner.parameters()}) == 1
    assert step.eager_reason is None
    assert not warned()


def test_long_sequences_are_left_to_a_replay(monkeypatch, warned):
    """Inductor would compile each step of a sequence by itself."""
    monkeypatch.setattr(tracing, "_MOST_CELLS", 7)
    made, expected, step = both(
        lambda: Sequences(nn.LSTM, num_layers=2), mean_square, data(), "inductor", make_optimizer=adamw
    )
    assert_identical(made, expected)
    assert step.eager_reason is None
    (message,) = warned()
    assert "8 steps of recurrent layers" in message


def test_modes_and_lengths_each_have_a_graph():
    def objective(model, x, training):
        model.train(training)
        return model(x)[0].square().mean()

    lengths = [(x, training) for steps in (4, 5) for (x,) in data(steps=steps) for training in (True, False)]
    made, expected, step = both(
        lambda: Sequences(nn.LSTM, num_layers=2, dropout=0.4), objective, lengths, make_optimizer=adamw
    )
    assert_identical(made, expected)
    assert step.eager_reason is None


def test_autocast():
    def objective(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            out, _ = model(x)
        return out.float().square().mean()

    made, expected, _ = both(lambda: Sequences(nn.LSTM), objective, data(), make_optimizer=adamw)
    assert_identical(made, expected)


class Packed(nn.Module):
    """Sequences of several lengths, without what fills them up."""

    def __init__(self, kind, *, are_sorted):
        super().__init__()
        self.inner, self.head, self.are_sorted = kind(6, 8, batch_first=True), nn.Linear(8, 3), are_sorted

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=self.are_sorted)
        out, _ = nn.utils.rnn.pad_packed_sequence(self.inner(packed)[0], batch_first=True)
        return self.head(out)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("lengths", [torch.tensor([4, 3, 2]), [2, 4, 3]], ids=["sorted", "unsorted list"])
def test_packed_sequences_run_eagerly(kind, lengths, warned):
    """How often each step of theirs runs is a value of a tensor."""
    batches = [(x, lengths) for (x,) in data()]
    made, expected, step = both(
        lambda: Packed(kind, are_sorted=torch.is_tensor(lengths)),
        lambda model, *batch: model(*batch).square().mean(), batches, make_optimizer=adamw,
    )  # fmt: skip
    assert_identical(made, expected)
    assert "rnn.py" in step.eager_reason or "test_recurrent_layers.py" in step.eager_reason
    assert len(warned()) == 1


def test_a_batch_that_is_a_packed_sequence():
    batches = [(nn.utils.rnn.pack_sequence([x[0], x[1, :3], x[2, :2]]),) for (x,) in data()]
    made, expected, _ = both(
        lambda: nn.LSTM(6, 8), lambda model, x: model(x)[0].data.square().mean(), batches, make_optimizer=adamw
    )
    assert_identical(made, expected)


def test_settings_of_dynamo_stay_as_they_were():
    before = torch._dynamo.config.allow_rnn
    seen = []

    def objective(model, x):
        return model(x)[0].square().mean()

    _, _, step = both(lambda: nn.GRU(6, 8), objective, data(), make_optimizer=adamw)
    seen.append(torch._dynamo.config.allow_rnn)
    assert step.eager_reason is None
    assert seen == [before] == [False]
