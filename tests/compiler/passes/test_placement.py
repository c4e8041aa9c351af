import pytest
import torch
from torch import optim
from torch.fx.experimental.proxy_tensor import make_fx

import gradweave
from compiler.models import Convolutional, Deep, adamw, assert_identical, batches, loss_fn, train
from gradweave._compat.tracing import fake_mode, fake_of, trace_to_graph
from gradweave.compiler import lower, program
from gradweave.compiler.passes.placement import has_data_dependent_sizes, take_out_counters, updates_at_their_gradients
from gradweave.step_graph.nodes import phase_of
from step_graph.test_recompute import peak_bytes


@pytest.fixture
def traced(monkeypatch):
    """What was traced of a step of a deep model, before any pass."""
    kept = []

    def keep(*args, **named):
        kept.append(trace(*args, **named))
        return kept[-1]

    trace = program.trace_step
    monkeypatch.setattr(program, "trace_step", keep)
    monkeypatch.setattr(lower, "updates_at_their_gradients", lambda graph: None)
    torch.manual_seed(0)
    model = Deep()
    step = gradweave.compile(model, loss_fn, adamw(model.parameters()), lower="replay")
    for x, y in batches(2):
        step(x, y)
    return kept[0]


def test_every_operation_knows_its_part_of_the_step(traced):
    phases = [phase_of(node) for node in traced.graph.graph.nodes if node.op == "call_function"]
    in_order = list(dict.fromkeys(phase for phase in phases if phase))
    assert in_order == ["forward", "backward", "update"]
    assert sum(phase == "" for phase in phases) <= 2


def test_updates_move_to_their_gradients(traced):
    graph = traced.graph

    def run():
        torch.manual_seed(3)
        inputs = [_random(node) for node in graph.graph.nodes if node.op == "placeholder"]
        count = len(traced.optimizer.state_slots)
        first, state = inputs[: traced.input_count], inputs[traced.input_count : traced.input_count + count]
        loss = graph(first, state, list(traced.optimizer.numbers()))
        return [*loss, *first, *state]

    peak, expected = peak_bytes(graph), run()
    updates_at_their_gradients(graph)
    phases = [phase_of(node) for node in graph.graph.nodes if node.op == "call_function"]
    assert phases.index("update") < len(phases) - 1 - phases[::-1].index("backward")
    assert all(torch.equal(a, b) for a, b in zip(run(), expected, strict=True))
    assert peak_bytes(graph) < peak


def _random(node):
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        return None
    if value.dtype is torch.int64:
        return torch.randint(0, 5, value.shape)
    return torch.rand(value.shape, dtype=value.dtype) + 0.5


def test_an_update_stays_behind_what_reads_the_weight_as_it_was():
    def step(weight, x):
        with torch.fx.traceback.annotate({"gradweave_phase": "backward"}):
            gradient = x * 2
        with torch.fx.traceback.annotate({"gradweave_phase": "backward"}):
            late = gradient.sum() * weight.t()
        with torch.fx.traceback.annotate({"gradweave_phase": "update"}):
            weight.sub_(gradient)
        return late

    mode = fake_mode()
    with mode:
        graph = trace_to_graph(step)(fake_of(mode, torch.ones(3, 3)), fake_of(mode, torch.ones(3, 3)))
    weight, x = torch.randn(3, 3), torch.randn(3, 3)
    expected = step(weight.clone(), x)
    updates_at_their_gradients(graph)
    assert torch.equal(graph(weight, x), expected)


def test_counters_are_taken_out_and_nothing_else():
    def step(count, used, weight):
        count.add_(1)
        used.add_(1)
        weight.add_(1.0)
        return weight * used

    graph = make_fx(step)(torch.tensor(3), torch.tensor(3), torch.ones(2))
    assert take_out_counters(graph, 3) == [0]
    count, used, weight = torch.tensor(3), torch.tensor(3), torch.ones(2)
    assert torch.equal(graph(count, used, weight), torch.full((2,), 8.0))
    assert (count, used) == (3, 4)


def test_batches_are_counted_by_a_compiled_step():
    torch.manual_seed(0)
    model = Convolutional()
    step = gradweave.compile(model, loss_fn, adamw(model.parameters()))
    for x, y in batches(4):
        step(x, y)
    assert model.norm.num_batches_tracked == 4


@pytest.mark.parametrize(
    ("pick", "is_of_values"),
    [
        (lambda x: x[torch.tensor([[2], [0]]), torch.tensor([1, 0])], False),
        (lambda x: x.masked_select(x > 0), True),
        (lambda x: x[x > 0], True),
        (lambda x: x[(x > 0).any(1).nonzero()[:, 0]], True),
    ],
)
def test_only_masks_give_sizes_that_depend_on_values(pick, is_of_values):
    graph = make_fx(pick, tracing_mode="symbolic", _allow_non_fake_inputs=True)(torch.randn(3, 4))
    assert has_data_dependent_sizes(graph) is is_of_values


class Noisy(optim.SGD):
    """Draws noise with torch."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad + 0.01 * torch.randn_like(p), alpha=group["lr"])


def test_an_optimizer_that_draws_noise_is_replayed_in_its_order():
    assert_identical(*(train("mlp", lower, lambda p: Noisy(p, lr=0.1)) for lower in ("replay", None)))
