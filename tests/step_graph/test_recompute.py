from contextlib import nullcontext

import pytest
import torch

import gradweave
from compiler.models import Deep, adamw, loss_fn
from gradweave.compiler import program


def peak_bytes(graph):
    """Most bytes alive at once in a graph that runs in its order, its inputs aside."""
    nodes = list(graph.graph.nodes)
    storage = {n: n.meta["val"].untyped_storage() for n in nodes if isinstance(n.meta.get("val"), torch.Tensor)}
    inputs = {storage[n]._cdata for n in nodes if n.op == "placeholder" and n in storage}
    born, dies, size = {}, {}, {}
    for index, node in enumerate(nodes):
        for used in (node, *node.all_input_nodes):
            if used in storage and storage[used]._cdata not in inputs:
                key = storage[used]._cdata
                born.setdefault(key, index)
                dies[key] = index
                size[key] = storage[used].nbytes()
    alive = [sum(size[k] for k in size if born[k] <= index <= dies[k]) for index in range(len(nodes))]
    return max(alive)


def run(monkeypatch, *, checkpoints=False, memory_budget=None):
    """Losses, and the peak of what was traced."""
    peaks = []

    def trace(*args, **named):
        traced = program_trace(*args, **named)
        peaks.append(peak_bytes(traced.graph))
        return traced

    program_trace = program.trace_step
    monkeypatch.setattr(program, "trace_step", trace)
    torch.manual_seed(0)
    model = Deep(checkpoints)
    step = gradweave.compile(model, loss_fn, adamw(model.parameters()), lower="replay", memory_budget=memory_budget)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(600, 48, generator=generator), torch.randint(0, 5, (600,), generator=generator)
    losses = [step(x, y) for _ in range(4)]
    monkeypatch.setattr(program, "trace_step", program_trace)
    return torch.stack(losses), peaks[0]


@pytest.mark.parametrize("options", [{"memory_budget": 0.5}, {"checkpoints": True}], ids=["budget", "checkpoints"])
def test_recomputed_activations_save_memory_and_change_nothing(monkeypatch, options):
    losses, peak = run(monkeypatch)
    recomputed, less = run(monkeypatch, **options)
    assert torch.equal(losses, recomputed)
    assert less < 0.75 * peak


def test_the_budget_of_torch_keeps_the_peak(monkeypatch):
    losses, peak = run(monkeypatch)
    recomputed, same = run(monkeypatch, memory_budget=1.0)
    assert torch.equal(losses, recomputed)
    assert same <= peak


class Gated(torch.nn.Module):
    """Has a parameter that only an extra result depends on, and an extra result without a derivative at 0."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(6))
        self.bias = torch.nn.Parameter(torch.zeros(6))
        self.probe = torch.nn.Linear(6, 2)
        self.register_buffer("mask", torch.tensor([0.0, 1, 1, 1, 1, 1]))

    def loss(self, x):
        hidden = self.weight * (x * self.mask)
        return (hidden + self.bias - 1).square().mean(), (hidden.square().mean(0).sqrt(), self.probe(hidden))


class RunningNormalizer(torch.nn.Module):
    """Uses its statistics, and then changes them."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))

    def loss(self, x):
        hidden = self.layer(x)
        centred = (hidden - self.mean.exp()).tanh()
        with torch.no_grad():
            self.mean.lerp_(hidden.mean(0), 0.1)
        return (centred - 1).square().mean(), None


class SharedBuffers(torch.nn.Module):
    """Two buffers on one storage, one of them changed in forward."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 4)
        whole = torch.ones(6)
        self.register_buffer("whole", whole)
        self.register_buffer("part", whole[:4])

    def loss(self, x):
        self.whole.mul_(1.1)
        return (self.layer(x) * self.part).square().mean() * torch.tensor(2.0), None


@pytest.mark.parametrize(
    ("model_class", "optimizer"),
    [
        (Gated, torch.optim.AdamW),
        (RunningNormalizer, torch.optim.SGD),
        (SharedBuffers, torch.optim.SGD),
        *(pytest.param(cls, torch.optim.AdamW, marks=pytest.mark.slow) for cls in (RunningNormalizer, SharedBuffers)),
        pytest.param(Gated, torch.optim.SGD, marks=pytest.mark.slow),
    ],
)
def test_what_the_partitioner_cannot_do_or_would_do_differently(model_class, optimizer):
    def train(lower):
        torch.manual_seed(0)
        model = model_class()
        optim = optimizer(model.parameters(), lr=0.1, weight_decay=0.1)
        step = gradweave.compile(model, lambda m, x: m.loss(x), optim, lower=lower)
        generator = torch.Generator().manual_seed(1)
        results = [step(torch.randn(8, 6, generator=generator)) for _ in range(5)]
        losses = [result[0] if isinstance(result, tuple) else result for result in results]
        return torch.stack(losses), model.state_dict(), optim.state_dict()["state"]

    made, expected = train("inductor"), train("replay")
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("budget", [None, 1.0, 0.5])
def test_dropout_drops_in_backward_what_it_dropped_in_forward(budget):
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.ones(64))

    def loss(model, x):
        dropped = torch.nn.functional.dropout(torch.sin(model.weight * x), 0.5)
        return dropped.sum(), dropped

    step = gradweave.compile(model, loss, torch.optim.SGD(model.parameters(), lr=1.0), memory_budget=budget)
    x = torch.linspace(0.5, 1.0, 64)
    step(x)
    for _ in range(3):
        before = model.weight.detach().clone()
        _, dropped = step(x)
        assert torch.equal(dropped == 0, model.weight.detach() == before)


class FusedDropout(torch.nn.Module):
    """As dropout is on a GPU: one operation gives the result and the mask."""

    def forward(self, x):
        return torch.native_dropout(x, 0.5, True)[0]


def test_random_numbers_are_kept_when_activations_are_recomputed():
    def run(budget):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(), torch.nn.Linear(8, 8), torch.nn.Tanh())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = lambda m, x: m(x).sum()  # noqa: E731
        step = gradweave.compile(model, loss, optimizer, lower="replay", memory_budget=budget)
        return [step(torch.ones(2, 8)) for _ in range(4)], list(model.parameters())

    torch.testing.assert_close(run(0.1), run(None), rtol=0, atol=0)


def test_random_numbers_that_would_be_drawn_again_are_refused():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), FusedDropout(), torch.nn.Linear(8, 8), torch.nn.Tanh())
    step = gradweave.compile(
        model, lambda m, x: m(x).sum(), torch.optim.SGD(model.parameters(), lr=0.1), lower="replay", memory_budget=0.1
    )
    step(torch.ones(2, 8))
    with pytest.raises(gradweave.GradweaveError, match=r"memory_budget=0\.1.*draw"):
        step(torch.ones(2, 8))


def test_a_recorded_step_keeps_everything(monkeypatch):
    """No activation is recomputed in it, and it is the step that an eager one would be."""

    def make():
        torch.manual_seed(0)
        layers = [torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 2)]
        model = torch.nn.Sequential(*layers)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    traced = []
    trace_step = program.trace_step
    monkeypatch.setattr(program, "trace_step", lambda *a, **k: traced.append(trace_step(*a, **k)) or traced[-1])
    model, optimizer = make()
    step = gradweave.compile(model, lambda m, x: m(x).square().mean(), optimizer, memory_budget=0.3)
    batches = torch.randn(3, 4, 8)
    step.record(lambda *_: nullcontext())
    for x in batches:
        step(x)
    operations = [node.target for node in traced[-1].graph.graph.nodes]
    assert operations.count(torch.ops.aten.tanh.default) == 1

    stock, optimizer = make()
    for x in batches:
        optimizer.zero_grad()
        stock(x).square().mean().backward()
        optimizer.step()
    torch.testing.assert_close(model.state_dict(), stock.state_dict())
