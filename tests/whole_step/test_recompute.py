import pytest
import torch

import gradweave
from gradweave.whole_step import program
from whole_step.models import Deep, adamw, loss_fn


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

    def trace(*args):
        traced = program_trace(*args)
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
def test_activations_computed_anew_save_memory_and_change_nothing(monkeypatch, options):
    losses, peak = run(monkeypatch)
    anew, less = run(monkeypatch, **options)
    assert torch.equal(losses, anew)
    assert less < 0.75 * peak


def test_the_budget_of_torch_keeps_the_peak(monkeypatch):
    losses, peak = run(monkeypatch)
    anew, same = run(monkeypatch, memory_budget=1.0)
    assert torch.equal(losses, anew)
    assert same <= peak
