"""What cannot be one graph runs eagerly, or operation by operation: stock's result, once, with one warning."""

import logging
import warnings

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import gradweave
from compiler.models import adamw, assert_identical, batches, loss_fn, make
from gradweave.compiler import api as step_module
from gradweave.compiler import program
from gradweave.errors import ArgumentError, GradweaveError


def both(make_model, objective, data, lower="replay", make_optimizer=lambda p: optim.SGD(p, lr=0.1), **options):
    """The same training eagerly and with a compiled step: two (model, optimizer, losses), and the step."""
    runs, step = [], None
    for compiled in (False, True):
        torch.manual_seed(0)
        model = make_model()
        optimizer = make_optimizer(model.parameters())
        torch.manual_seed(7)
        if compiled:
            step = gradweave.compile(model, objective, optimizer, lower=lower, **options)
        losses = []
        for batch in data:
            if compiled:
                losses.append(step(*batch))
                continue
            losses.append(objective(model, *batch))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        runs.append((model, optimizer, torch.stack(losses).detach()))
    return runs[1], runs[0], step


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
@pytest.mark.parametrize("name", ["experts", "sparse", "permutation", "LSTM"])
def test_what_inductor_cannot_compile_is_trained_all_the_same(name, warned):
    make_model, objective, shape = HARD[name]
    generator = torch.Generator().manual_seed(1)
    data = [(torch.randn(shape, generator=generator),) for _ in range(6)]
    made, expected, _ = both(make_model, objective, data, "inductor")
    torch.testing.assert_close(made[2], expected[2], rtol=1e-5, atol=1e-7)
    assert len(warned()) <= 1


LOGGER = logging.getLogger("a model")


class Talking(nn.Module):
    """Tells its user something in every forward."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(48, 5)

    def forward(self, x):
        LOGGER.warning("is called")
        warnings.warn("is called", stacklevel=1)
        return self.inner(x)


@pytest.mark.filterwarnings("ignore:is called")
def test_what_a_model_logs_does_not_keep_it_from_being_compiled():
    made, expected, step = both(Talking, loss_fn, list(batches(4)))
    assert_identical(made, expected)
    assert step.eager_reason is None


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


def test_what_inductor_fails_at_is_replayed(monkeypatch, warned):
    from gradweave.compiler import lower

    def broken(*_, **__):
        raise AssertionError("on purpose")

    monkeypatch.setattr(lower, "compile_with_inductor", broken)
    made, expected, step = both(lambda: make("mlp"), loss_fn, list(batches(5)), "inductor", adamw)
    assert_identical(made, expected)
    assert step.eager_reason is None
    (message,) = warned()
    assert "Inductor" in message


@pytest.mark.parametrize("lower", ["replay", "inductor"])
def test_a_graph_that_fails_when_it_first_runs_changes_nothing_and_gives_way(lower, monkeypatch, warned):
    kind = program.Replay if lower == "replay" else program.Compiled

    def broken(*_):
        raise AssertionError("on purpose")

    monkeypatch.setattr(kind, "run", broken)
    made, expected, step = both(lambda: make("mlp"), loss_fn, list(batches(5)), lower, adamw)
    assert_identical(made, expected)
    assert (step.eager_reason is None) == (lower == "inductor")
    assert len(warned()) == 1


@pytest.fixture
def frail():
    """An operation whose backward fails when it is called the second time, in the first graph; and its calls."""
    calls = []

    @torch.library.custom_op("gradweave_tests::back", mutates_args=())
    def back(grad: torch.Tensor) -> torch.Tensor:
        calls.append(None)
        if len(calls) == 2:
            raise ValueError("on purpose")
        return grad.clone()

    @torch.library.custom_op("gradweave_tests::frail", mutates_args=())
    def frail(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    back.register_fake(torch.empty_like)
    frail.register_fake(torch.empty_like)
    frail.register_autograd(lambda _, grad: back(grad))
    return frail, calls


def test_a_graph_that_fails_late_in_its_first_backward_has_updated_nothing(frail, warned):
    operation, calls = frail

    class Frail(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.head = nn.Linear(48, 8), nn.Linear(8, 5)

        def forward(self, x):
            return self.head(operation(self.inner(x)))

    def run(compiled):
        torch.manual_seed(0)
        model, losses = Frail(), []
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        calls.clear()
        step = gradweave.compile(model, loss_fn, optimizer, lower="replay") if compiled else None
        for batch in batches(6):
            if step is not None:
                losses.append(step(*batch))
                continue
            calls.clear()  # does not fail
            losses.append(loss_fn(model, *batch))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer, torch.stack(losses).detach()

    assert_identical(run(compiled=True), run(compiled=False))
    (message,) = warned()
    assert "ValueError: on purpose" in message


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


class Words(nn.Module):
    """A classifier of bags of words."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Embedding(50, 16), nn.Linear(16, 5)

    def forward(self, words):
        return self.head(torch.tanh(self.inner(words)).mean(1))


@pytest.mark.parametrize("lower", ["replay", "inductor"])
@pytest.mark.parametrize("short", ["rows", "words"])
def test_token_ids_are_not_padded(lower, short, warned):
    generator = torch.Generator().manual_seed(0)
    data = []
    for number in range(6):
        words, y = torch.randint(0, 50, (4, 12), generator=generator), torch.randint(0, 5, (4,), generator=generator)
        if number >= 3:
            words, y = (words[:2], y[:2]) if short == "rows" else (words[:, :7], y)
        data.append((words, y))
    made, expected, _ = both(Words, loss_fn, data, lower, new_shapes="pad")
    torch.testing.assert_close(made[2], expected[2], rtol=1e-5, atol=0)
    if lower == "replay":
        assert_identical(made, expected)
    (message,) = warned()
    assert "tensor 0" in message
    assert "where batches are made" in message


def test_targets_are_padded_with_what_the_loss_leaves_out(warned):
    def with_zero_left_out(model, x, y):
        return F.cross_entropy(model(x), y.view(-1), ignore_index=0)

    data = [(x[: 6 - number % 3], y[: 6 - number % 3].clamp(min=1)) for number, (x, y) in enumerate(batches(7))]
    made, expected, step = both(lambda: make("mlp"), with_zero_left_out, data, new_shapes="pad")
    torch.testing.assert_close(made[2], expected[2], rtol=1e-5, atol=1e-6)
    assert step.eager_reason is None
    assert not warned()


def test_batches_by_name():
    def run(lower):
        model = make("mlp")
        optimizer = adamw(model.parameters())
        objective = lambda model, **batch: F.cross_entropy(model(batch["x"]), batch["y"])  # noqa: E731
        step = gradweave.compile(model, objective, optimizer, lower=lower, new_shapes="pad") if lower else None
        losses = []
        for number, (x, y) in enumerate(batches(6)):
            batch = {"x": x[: 6 - number % 2], "y": y[: 6 - number % 2]}
            if step:
                losses.append(step(**batch))
                continue
            losses.append(objective(model, **batch))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.stack(losses).detach(), step

    (made, step), (expected, _) = run("replay"), run(None)
    torch.testing.assert_close(made, expected, rtol=1e-5, atol=0)
    assert step.eager_reason is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_grad_norm": "1"}, "max_grad_norm='1'"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm=nan"),
        ({"max_grad_value": True}, "max_grad_value=True"),
        ({"memory_budget": "0.5"}, "memory_budget='0.5'"),
        ({"variants": 2.0}, "variants=2.0"),
        ({"lower": None}, "lower=None"),
        ({"scaler": True}, "scaler='bool'"),
        ({"costs": "measured"}, "costs='str'"),
        ({"loss_fn": nn.CrossEntropyLoss()}, "loss_fn='CrossEntropyLoss'.*not with the model.*lambda"),
        ({"loss_fn": F.cross_entropy}, "loss_fn='cross_entropy'.*not with the model"),
        ({"loss_fn": lambda: None}, "loss_fn='<lambda>'.*takes no model"),
        ({"loss_fn": "mse"}, "loss_fn='str'"),
        ({"optimizer": "adam"}, "optimizer='str'"),
    ],
)
def test_bad_arguments_are_named(options, message):
    model = make("mlp")
    given = {"loss_fn": loss_fn, "optimizer": adamw(model.parameters()), **options}
    with pytest.raises(ArgumentError, match=message):
        gradweave.compile(model, **given)


def left_behind(model, optimizer):
    """Everything that could be left on a model and an optimizer."""
    hooks = [value for module in model.modules() for name, value in vars(module).items() if "hook" in name and value]
    marks = [name for name in vars(optimizer) if "gradweave" in name]
    instance = [name for module in model.modules() for name in vars(module) if name == "forward"]
    return hooks, marks, instance, [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    "part",
    [
        "check_options",
        "check_step",
        "check_loss_fn",
        "StepState",
        "EagerFallback",
        "_Parts",
        "_CapturedParts",
        "dynamo_compile",
    ],
)
def test_a_compile_that_fails_leaves_nothing_behind(part, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("on purpose")

    model = make("mlp")
    optimizer = adamw(model.parameters())
    with monkeypatch.context() as patch:
        patch.setattr(step_module, part, broken)
        with pytest.raises(RuntimeError, match="on purpose"):
            gradweave.compile(model, loss_fn, optimizer)
    assert left_behind(model, optimizer) == ([], [], [], [])
    gradweave.fuse(model, optimizer, "forward").detach()


@pytest.mark.parametrize("where", ["forward", "loss", "backward"])
def test_a_first_step_that_fails_leaves_a_model_that_trains(where):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ValueError("on purpose")

    bad = [True]

    def objective(model, x, y):
        if bad[0] and where == "forward":
            raise ValueError("on purpose")
        loss = loss_fn(model, x, y)
        if bad[0] and where == "loss":
            return loss.expand(2)
        return Fails.apply(loss) if bad[0] else loss

    model = make("mlp")
    optimizer = adamw(model.parameters())
    step = gradweave.compile(model, objective, optimizer, lower="replay")
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises((ValueError, GradweaveError)):
        step(*next(batches(1)))
    assert all(map(torch.equal, before, model.parameters()))
    assert not optimizer.state
    assert left_behind(model, optimizer)[0] == []
    bad[0] = False
    for batch in batches(3):
        step(*batch)
    assert step.eager_reason is None


def test_wrapped_optimizers_of_accelerate():
    import accelerate

    made = []
    for wrapped in (True, False):
        model = make("mlp")
        optimizer = adamw(model.parameters())
        given = accelerate.Accelerator(cpu=True).prepare(optimizer) if wrapped else optimizer
        step = gradweave.compile(model, loss_fn, given, lower="replay")
        made.append((model, optimizer, torch.stack([step(x, y) for x, y in batches(4)])))
    assert_identical(*made)


def test_wrapped_optimizers_of_lightning():
    from lightning.pytorch.core.optimizer import LightningOptimizer

    model = make("mlp")
    optimizer = adamw(model.parameters())
    step = gradweave.compile(model, loss_fn, LightningOptimizer(optimizer), lower="replay")
    losses = torch.stack([step(x, y) for x, y in batches(4)])
    assert step.optimizer is optimizer
    assert len(losses.unique()) == 4


def test_dynamo_that_is_switched_off(monkeypatch):
    with torch.compiler.set_stance("force_eager"):
        made, expected, _ = both(lambda: make("mlp"), loss_fn, list(batches(4)))
    assert_identical(made, expected)
