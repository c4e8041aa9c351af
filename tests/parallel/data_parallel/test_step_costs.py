import pytest
import torch
from torch import nn

from gradweave._runtime.split_calls.queue import WeightGradientQueue
from gradweave._runtime.split_calls.task import Task
from gradweave.parallel.data_parallel.layers import UseOrder
from gradweave.parallel.data_parallel.reverse_first_k import calls_by_layer
from gradweave.parallel.data_parallel.step_costs import StepWatch

FORWARD, BACKWARD, UPDATE = 0.004, 0.008, 0.02


class Clock:
    """Time that passes while a model sleeps, and hardly at all while it works."""

    now = 0.0

    def perf_counter(self):
        self.now += 1e-7
        return self.now

    def sleep(self, seconds):
        self.now += seconds


time = Clock()


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    monkeypatch.setattr("gradweave._runtime.ab_trial.time", time)


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        time.sleep(FORWARD)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(BACKWARD)
        return grad.clone()


class SlowLinear(nn.Linear):
    def forward(self, x):
        return super().forward(Slow.apply(x))


class SlowOptimizer(torch.optim.SGD):
    def step(self, closure=None):
        time.sleep(UPDATE)
        return super().step(closure)


def watched(model, optimizer):
    """A watch over a model that has been run once."""
    order = UseOrder(model)
    model(torch.ones(2, 3))
    order.close()
    layers = order.layers(order.numbers())
    return StepWatch(layers, optimizer, torch.device("cpu")), layers


def test_costs_are_those_of_the_layers():
    model = nn.Sequential(nn.Linear(3, 3), SlowLinear(3, 300), nn.ReLU(), nn.Linear(300, 1))
    optimizer = SlowOptimizer(model.parameters(), lr=0.1)
    watch, layers = watched(model, optimizer)
    for _ in range(4):
        with calls_by_layer(WeightGradientQueue(watch), layers):
            loss = model(torch.ones(2, 3)).sum()
        watch.backward_begins()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    first, slow, last = watch.close().layers
    assert slow.forward >= FORWARD > first.forward
    assert first.input_grad >= BACKWARD > last.input_grad
    assert all(cost.weight_grad > 0 for cost in (first, slow, last))
    assert first.update + slow.update + last.update == pytest.approx(UPDATE, rel=1e-3)
    assert slow.parameter_bytes == 4 * 4 * 300
    assert slow.output_bytes == 4 * 2 * 300
    assert not any(module._forward_pre_hooks for module in model.modules())


class Pause(nn.Module):
    """No layer: it has no weights."""

    def forward(self, x):
        time.sleep(FORWARD)
        return x


def test_nothing_of_a_step_is_left_out():
    model = nn.Sequential(nn.Linear(3, 3), Pause(), nn.Linear(3, 3), Pause())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch, layers = watched(model, optimizer)
    spent = []
    for _ in range(5):
        began = time.perf_counter()
        with calls_by_layer(WeightGradientQueue(watch), layers):
            loss = model(torch.ones(2, 3)).sum()
        watch.backward_begins()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        spent.append(time.perf_counter() - began)
    costs = watch.close()
    first, last = costs.layers
    assert first.forward < FORWARD
    assert last.forward >= 2 * FORWARD
    assert costs.compute_seconds == pytest.approx(sorted(spent)[2], rel=1e-3)


def test_what_belongs_to_no_layer_counts_as_input_gradient_of_the_next():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch, layers = watched(model, optimizer)
    for _ in range(3):
        with calls_by_layer(WeightGradientQueue(watch), layers):
            loss = model(torch.ones(2, 3)).sum()
        watch.backward_begins()
        watch.start(Task(len(layers), (), lambda: time.sleep(FORWARD)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    first, last = watch.close().layers
    assert last.input_grad >= FORWARD > first.input_grad


@pytest.mark.parametrize("odd", ["no word of backward", "a forward before step", "a step that fails"])
def test_loops_that_are_odd(odd):
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch, layers = watched(model, optimizer)
    for number in range(5):
        with calls_by_layer(WeightGradientQueue(watch), layers):
            loss = model(torch.ones(2, 3)).sum()
        if odd != "no word of backward":
            watch.backward_begins()
        loss.backward()
        if odd == "a forward before step":
            with torch.no_grad():
                model(torch.ones(2, 3))
        if odd == "a step that fails" and number == 1:
            optimizer.param_groups[0]["lr"] = "much"
            with pytest.raises(TypeError):
                optimizer.step()
            optimizer.param_groups[0]["lr"] = 0.1
        else:
            optimizer.step()
        optimizer.zero_grad()
    assert watch.steps == (4 if odd == "a step that fails" else 5)
    assert all(layer.weight_grad > 0 for layer in watch.close().layers)
