import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

from gradweave.compiler.optimizer_inputs import OptimizerInputs
from gradweave.compiler.trace import Clipping, Recipe, trace_step
from gradweave.schedule.tasks import Kind
from gradweave.step_graph.objective import Objective
from gradweave.step_graph.tasks import split_convolution_backward

aten = torch.ops.aten


def traced(model, x, y, **clip):
    """A traced step of AdamW, with the model's parameters as the first inputs."""
    params = dict(model.named_parameters())
    optimizer = optim.AdamW(params.values(), lr=0.1)
    F.mse_loss(model(x), y).backward()
    optimizer.step()

    def forward(*inputs):
        weights = dict(zip(params, inputs, strict=False))
        return [F.mse_loss(torch.func.functional_call(model, weights, (inputs[-2],)), inputs[-1])]

    objective = Objective(forward, [*params.values(), x, y], range(len(params)), 0)
    recipe = Recipe(Clipping(**clip))
    return trace_step(objective, OptimizerInputs(optimizer, list(params.values())), recipe)


def mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 4))


@pytest.mark.parametrize("clip", [{}, {"max_norm": 1.0}, {"max_value": 0.1}])
def test_products_of_an_mlp(clip):
    step = traced(mlp(), torch.randn(3, 8), torch.randn(3, 4), **clip)
    places = step.tasks(mlp_of(step)).places
    products = [
        tuple(places[node]) for node in step.graph.graph.nodes if node.target in (aten.mm.default, aten.addmm.default)
    ]
    forward = [(Kind.F, 0), (Kind.F, 1), (Kind.F, 2)]
    backward = {(Kind.X, 2), (Kind.W, 2), (Kind.X, 1), (Kind.W, 1), (Kind.W, 0)}
    assert products[:3] == forward
    assert len(products) == 8
    assert set(products[3:]) == backward


def mlp_of(step):
    """A model around the parameters that a step was traced for."""
    model = mlp()
    for (name, _), p in zip(list(model.named_parameters()), step.optimizer.params, strict=True):
        module, _, key = name.rpartition(".")
        setattr(model.get_submodule(module), key, p)
    return model


@pytest.mark.parametrize("clip", [{}, {"max_norm": 1.0}])
def test_every_operation_has_a_task_and_every_update_its_layer(clip):
    step = traced(mlp(), torch.randn(3, 8), torch.randn(3, 4), **clip)
    places = step.tasks(mlp_of(step)).places
    nodes = step.graph.graph.nodes
    assert set(places) == {node for node in nodes if node.op == "call_function"}
    placeholders = [node for node in nodes if node.op == "placeholder"]
    layer_of = dict(zip(placeholders, step.owners, strict=True))
    for node in nodes:
        if node.target in (aten.addcdiv_.default, aten.addcmul_.default, aten.lerp_.Scalar):
            target = node
            while target.op != "placeholder":
                target = target.args[0]
            assert places[node] == (Kind.U, layer_of[target] // 2)


def test_tied_weights_are_one_layer_and_a_second_use_belongs_to_the_layer_that_waits_for_it():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(8, 8, bias=False)
            self.second = nn.Linear(8, 8, bias=False)

        def forward(self, x):
            return self.first(torch.relu(self.second(torch.relu(self.first(x)))))

    model = Tied()
    step = traced(model, torch.randn(3, 8), torch.randn(3, 8))
    places = step.tasks(model).places
    assert {place.layer for place in places.values()} == {0, 1}
    products = [tuple(places[n]) for n in step.graph.graph.nodes if n.target is aten.mm.default]
    assert products[:3] == [(Kind.F, 0), (Kind.F, 1), (Kind.F, 1)]
    assert sorted(products[3:]) == sorted([(Kind.W, 0), (Kind.X, 1), (Kind.W, 1), (Kind.X, 1), (Kind.W, 0)])


def test_convolutions_have_both_tasks_once_they_are_split():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3, bias=False), nn.Flatten())
    x, y = torch.randn(2, 2, 9, 9), torch.randn(2, 18)
    step = traced(model, x, y)

    def taken():
        """Outputs, and weights and state as the step leaves them."""
        inputs = [value.detach().clone() for value in (*step.optimizer.params, x, y)]
        state = [value.clone() for value in step.optimizer.state()]
        return [*step.graph(inputs, state, list(step.optimizer.numbers())), *inputs, *state]

    expected = taken()
    split_convolution_backward(step.graph.graph)
    step.graph.recompile()
    found = [n for n in step.graph.graph.nodes if n.target is aten.convolution_backward.default]
    places = step.tasks(model).places
    tasks = [tuple(places[node]) for node in found]
    assert tasks == [(Kind.W, 2), (Kind.X, 2), (Kind.W, 1), (Kind.X, 1), (Kind.W, 0)]
    assert all(torch.equal(a, b) for a, b in zip(expected, taken(), strict=True))
