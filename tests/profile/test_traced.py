import pytest
import torch
from torch import nn

from gradweave._compat.tracing import DynamoError
from gradweave.profile.recorded import record_operations
from gradweave.profile.traced import trace_operations
from gradweave.schedule.tasks import Kind
from step_graph.models import MODELS, Called, Checkpointed, square


@pytest.mark.parametrize("name", ["mlp", "bfloat16", "frozen", "detached", "tied", "gpt"])
def test_traced_operations_are_the_recorded_ones(name):
    make, loss_fn, x = MODELS[name]
    model = make()
    params = [p for p in model.parameters() if p.requires_grad]
    counts = []
    for operations_of in (record_operations, trace_operations):
        called = Called()
        operations = operations_of(model, loss_fn, params, (x,))
        operations.run(called)
        counts.append((operations.layers, called.work()))
    assert counts[0] == counts[1]


def test_what_is_recomputed_is_backward():
    model, x = Checkpointed(), torch.randn(3, 8)
    called = Called()
    trace_operations(model, square, list(model.parameters()), (x,)).run(called)
    again = [kind for (kind, _, function), _ in called.of.items() if function == "aten.relu.default"]
    assert sorted(again, key=str) == [Kind.F, Kind.X]


class InParts(nn.Module):
    """Writes parts of its output one by one, which cannot be recorded: none is seen to write the whole."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 2), nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x):
        out = torch.zeros_like(x)
        out[:2] = self.experts[0](x[:2])
        out[2:] = self.experts[1](x[2:])
        return out * self.gate(x).softmax(-1)[:, :1]


def test_what_writes_in_parts_has_all_tasks():
    model, x = InParts(), torch.randn(4, 8)
    called = Called()
    operations = trace_operations(model, square, list(model.parameters()), (x,))
    operations.run(called)
    assert operations.layers == ("experts.0", "experts.1", "gate")
    assert {(kind, layer) for kind, layer, _ in called.work()} >= {(Kind.W, layer) for layer in range(3)}


def test_a_model_keeps_its_buffers_and_random_numbers():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout()), torch.randn(4, 8)
    before = torch.get_rng_state()
    trace_operations(model.eval(), square, list(model.parameters()), (x,))
    assert torch.equal(before, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())


def test_control_flow_by_value_cannot_be_traced():
    def decide(model, x):
        loss = square(model, x)
        return loss if loss.item() < 1e9 else 2 * loss

    model = nn.Linear(8, 8)
    with pytest.raises(DynamoError):
        trace_operations(model, decide, list(model.parameters()), (torch.randn(3, 8),))
