"""What cannot be one graph runs eagerly, or operation by operation: stock's result, once, with one warning."""

import re
from collections import deque

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import gradweave
from compiler.models import adamw, assert_identical, batches, both, loss_fn, make, train
from gradweave._compat.tracing import DynamoError, TooManyVariantsError
from gradweave.compiler import program
from gradweave.compiler.eager_fallback import EagerFallback, reason_of
from gradweave.errors import GradweaveError


def mean_square(model, *batch):
    return model(*batch).square().mean()


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.inner, self.head = kind(6, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.inner(x)[0][:, -1])


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Transformer(8, 2, 1, 1, 16, dropout=0.1, batch_first=True)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.inner(x, x, tgt_mask=mask)


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Embedding(20, 6, sparse=True), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.inner((x.abs() * 5).long().clamp(max=19)).mean(1))


class Experts(nn.Module):
    """Rows go to the expert of their choice, as many as there are."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(6, 2), nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])

    def forward(self, x):
        p = self.gate(x).softmax(-1)
        choice, out = p.argmax(-1), x.new_zeros(len(x), 3)
        for number, expert in enumerate(self.experts):
            rows = (choice == number).nonzero()[:, 0]
            out = out.index_add(0, rows, expert(x[rows]) * p[rows, number : number + 1])
        return out


class TwoMasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        ignored = torch.zeros(2, 5, dtype=torch.bool)
        ignored[0, 4] = True
        later = torch.ones(5, 5, dtype=torch.bool).triu(1)
        return self.inner(x, x, x, key_padding_mask=ignored, attn_mask=later)[0]


class Reentrant(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.two(checkpoint(lambda x: torch.tanh(self.one(x)), x.requires_grad_(), use_reentrant=True))


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 3)

    def forward(self, x):
        return self.inner(torch.nested.as_nested_tensor([x[:2], x[2:]], layout=torch.jagged)).values()


def mixed_up(model, x):
    share, order = torch.rand(()), torch.randperm(x.shape[0])
    out = model(x).square().mean(1)
    return (share * out + (1 - share) * out[order]).mean()


def with_gradient_penalty(model, x):
    x = x.clone().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.square().mean() + slope.square().mean()


def counted_characters(model, x):
    return F.ctc_loss(
        model(x).log_softmax(-1), torch.ones(2, 3, dtype=torch.long), torch.tensor([12, 12]), torch.tensor([3, 2])
    )


HARD = {
    "LSTM": (lambda: Recurrent(nn.LSTM), mean_square, (4, 7, 6)),
    "GRU": (lambda: Recurrent(nn.GRU), mean_square, (4, 7, 6)),
    "transformer": (Transformer, mean_square, (2, 5, 8)),
    "ctc": (lambda: nn.Linear(6, 10), counted_characters, (12, 2, 6)),
    "batch norm without momentum": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, momentum=None)), mean_square, (5, 6),
    ),
    "sparse": (Sparse, mean_square, (4, 6)),
    "experts": (Experts, mean_square, (8, 6)),
    "two masks": (TwoMasks, mean_square, (2, 5, 8)),
    "reentrant checkpoint": (Reentrant, mean_square, (5, 6)),
    "nested": (Nested, mean_square, (5, 6)),
    "permutation": (lambda: nn.Linear(6, 3), mixed_up, (5, 6)),
    "gradient penalty": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)), with_gradient_penalty, (5, 6),
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", HARD)
def test_what_is_hard_to_trace_is_trained_bit_for_bit(name, warned):
    make_model, objective, shape = HARD[name]
    generator = torch.Generator().manual_seed(1)
    made, expected, _ = both(make_model, objective, [(torch.randn(shape, generator=generator),) for _ in range(5)])
    assert_identical(made, expected)
    assert len(warned()) <= 1


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["experts", "sparse", "permutation"])
def test_what_inductor_cannot_compile_is_trained_all_the_same(name, warned):
    make_model, objective, shape = HARD[name]
    generator = torch.Generator().manual_seed(1)
    data = [(torch.randn(shape, generator=generator),) for _ in range(6)]
    made, expected, _ = both(make_model, objective, data, "inductor")
    torch.testing.assert_close(made[2], expected[2], rtol=1e-5, atol=1e-7)
    assert len(warned()) <= 1


class Counting(nn.Module):
    """Leaves traces of every forward: a buffer, a number, a list, a random number."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm, self.head = nn.Linear(48, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)
        self.calls, self.means, self.hard = 0, [], True

    def forward(self, x):
        self.calls += 1
        out = F.dropout(self.norm(self.inner(x)), 0.2)
        self.means.append(out.detach().mean())
        if self.hard and out.sum() > 1e9:
            raise ValueError
        return self.head(out)


@pytest.mark.parametrize("fails", ["capture", "trace", "lowering", "many"])
def test_a_step_that_is_taken_eagerly_is_taken_once(fails, monkeypatch, warned):
    def broken(*_, **__):
        raise RuntimeError("on purpose")

    if fails == "trace":
        monkeypatch.setattr(program, "trace_step", broken)
    elif fails == "lowering":
        monkeypatch.setattr(program, "Replay", broken)

    def make_model():
        model = Counting()
        model.hard = fails == "capture"
        return model

    made, expected, _ = both(make_model, loss_fn, list(batches(6)), make_optimizer=adamw, variants=2)
    assert_identical(made, expected)
    assert made[0].calls == expected[0].calls == 6
    assert torch.equal(torch.stack(made[0].means), torch.stack(expected[0].means))
    assert len(warned()) == 1


def test_a_graph_that_could_not_be_made_is_tried_again_ever_more_rarely(monkeypatch):
    tried, trace = [], program.trace_step

    def broken(*args, **named):
        tried.append(None)
        if len(tried) < 4:
            raise RuntimeError("on purpose")
        return trace(*args, **named)

    monkeypatch.setattr(program, "trace_step", broken)
    made, expected, step = both(lambda: make("mlp"), loss_fn, list(batches(20)))
    assert_identical(made, expected)
    assert len(tried) == 4
    assert step.eager_reason is None


def test_errors_of_the_user_are_the_users():
    def picky(model, x, y):
        if x.shape[0] == 3:
            raise KeyError("three rows")
        return loss_fn(model, x, y)

    model = make("mlp")
    step = gradweave.compile(model, picky, adamw(model.parameters()), lower="replay")
    x, y = next(batches(1))
    step(x, y)
    step(x, y)
    with pytest.raises(KeyError, match="three rows"):
        step(x[:3], y[:3])
    step(x, y)
    assert step.eager_reason is None


class Branches(nn.Module):
    """Python control flow on a value."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(48, 5)

    def forward(self, x):
        out = self.inner(x)
        return out if out.sum() > 0 else 2 * out


@pytest.mark.parametrize("kind", ["branch", "item"])
def test_what_cannot_be_one_graph_runs_eagerly_and_is_named_with_file_and_line(kind, warned):
    def with_item(model, x, y):
        loss = loss_fn(model, x, y)
        return 2 * loss if loss.item() < 0 else loss

    def run(lower):
        torch.manual_seed(0)
        model = Branches() if kind == "branch" else make("mlp")
        optimizer = adamw(model.parameters())
        objective = with_item if kind == "item" else loss_fn
        step = gradweave.compile(model, objective, optimizer, lower=lower) if lower else None
        losses = []
        for x, y in batches(5):
            if step:
                losses.append(step(x, y))
                continue
            losses.append(objective(model, x, y))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer, torch.stack(losses).detach()

    assert_identical(run("replay"), run(None))
    (message,) = warned()
    assert "test_eager_fallback.py" in message


def test_a_deque_with_a_maxlen_forgets_what_is_too_much(warned):
    def run(lower):
        history = deque([1.0], maxlen=3)

        def loss(model, x, y):
            history.append(history[-1] + len(history))
            return loss_fn(model, x, y) * history[0]

        return train("linear", lower, loss=loss), list(history)

    (made, history), (expected, other) = run("replay"), run(None)
    assert_identical(made, expected)
    assert history == other
    (message,) = warned()
    assert "deque" in message


def eager_steps(fallback, kind, most=20):
    """How many steps of a kind are taken eagerly before a graph is tried."""
    return next(number for number in range(most) if not fallback.count_down(kind))


def test_tries_are_twice_as_far_apart_after_each_failure():
    fallback = EagerFallback(variants=4)
    assert eager_steps(fallback, "a") == 0
    for expected in (2, 4, 8):
        fallback.note_failure("a")
        assert eager_steps(fallback, "a") == expected
    assert eager_steps(fallback, "b") == 0


def test_kinds_beyond_the_number_of_variants_count_as_one():
    fallback = EagerFallback(variants=2)
    fallback.note_success("fine")
    for kind in "abcd":
        fallback.note_failure(kind)
    assert eager_steps(fallback, "a") == 2
    assert eager_steps(fallback, "e") == 4
    assert eager_steps(fallback, "fine") == 0


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("bad\nmore"), "ValueError: bad"),
        (GradweaveError("bad"), "bad"),
        (RuntimeError(), "RuntimeError: RuntimeError"),
        (DynamoError('no\n  File "x.py", line 3'), r'loss_fn cannot be made one graph: no \(File "x.py", line 3\);'),
        (TooManyVariantsError(), "variants=4: no more graphs"),
    ],
)
def test_reasons_are_one_line_with_the_place(error, reason):
    assert re.match(reason, reason_of(error, 4))
    assert "\n" not in reason_of(error, 4)
