import logging
import random

import pytest
import torch
from torch import nn, optim
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn import functional as F

from gradweave import _logging, plan
from gradweave.errors import ArgumentError, GradweaveError, UnsupportedError
from gradweave.profile import measure, measure_costs
from gradweave.profile.measure import capturable_update
from gradweave.schedule.builders import single
from gradweave.schedule.costs import Costs

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[
        pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    ]),
]  # fmt: skip


def setting(device="cpu"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 8)).to(device)
    batch = torch.randn(256, 64, device=device), torch.randn(256, 8, device=device)
    return model, lambda m, x, y: F.mse_loss(m(x), y), optim.AdamW(model.parameters()), batch


@pytest.mark.parametrize("device", DEVICES)
def test_costs_of_an_mlp(device):
    model, loss_fn, optimizer, batch = setting(device)
    before = [p.clone() for p in model.parameters()]
    told = []
    costs = measure_costs(model, loss_fn, optimizer, batch, progress=lambda *what: told.append(what))
    assert [layer.name for layer in costs.layers] == ["0", "2", "4"]
    middle = costs.layers[1]
    assert all(seconds > 0 for seconds in (middle.forward, middle.input_grad, middle.weight_grad, middle.update))
    assert (middle.input_bytes, middle.output_bytes) == (4 * 256 * 512, 4 * 256 * 1024)
    assert middle.parameter_bytes == 4 * (512 + 1) * 1024
    assert costs.layers[0].input_grad == 0
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert not optimizer.state
    assert told[-1][1] == 1.0


@pytest.mark.parametrize("device", DEVICES)
def test_convolutions_whose_kernels_are_tried_out(device, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.LazyLinear(4)).to(device)
    batch = torch.randn(8, 3, 9, 9, device=device), torch.randn(8, 4, device=device)
    model(batch[0])
    costs = measure_costs(model, lambda m, x, y: F.mse_loss(m(x), y), optim.SGD(model.parameters()), batch, rounds=1)
    assert [layer.name for layer in costs.layers] == ["0", "1", "3"]
    assert all(layer.forward > 0 and layer.weight_grad > 0 for layer in costs.layers)


@pytest.mark.parametrize("device", DEVICES)
def test_a_layer_of_sixty_times_the_work_takes_longer(device):
    """On a shared machine a measurement may be interrupted; not every one of several is."""

    def holds():
        _, middle, last = measure_costs(*setting(device)).layers
        return middle.forward > last.forward and middle.weight_grad > last.weight_grad

    assert any(holds() for _ in range(8))


def test_the_cost_file_is_one_that_schedules_read(tmp_path):
    costs = measure_costs(*setting(), rounds=1)
    costs.save(tmp_path / "costs.json")
    loaded = Costs.load(tmp_path / "costs.json")
    assert loaded == costs
    timeline = plan(single(loaded, next_forward=False), policy="in_order").simulate()
    assert timeline.makespan == pytest.approx(costs.compute_seconds)


def test_no_rounds():
    with pytest.raises(ArgumentError, match="rounds"):
        measure_costs(*setting(), rounds=0)


def test_random_numbers_are_left_as_they_are():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 1))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    measure_costs(model, lambda m, x: m(x).sum(), optim.SGD(model.parameters(), lr=0.1), (torch.ones(2, 4),), rounds=1)
    assert torch.equal(before, torch.get_rng_state())


def test_a_model_without_parameters_is_refused():
    linear = nn.Linear(1, 1)
    with pytest.raises(UnsupportedError, match="no parameters"):
        measure_costs(nn.ReLU(), lambda m, x: m(x).sum(), optim.SGD(linear.parameters(), lr=0.1), (torch.ones(2),))


@pytest.mark.parametrize("name", ["RAdam", "Adafactor", "Muon"])
def test_the_update_is_measured_and_not_traced(name, monkeypatch):
    model, loss_fn, _, batch = setting("cpu")
    for p in model.parameters():
        p.requires_grad_(p.dim() == 2)
    optimizer = getattr(optim, name)([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    traced = []
    step = type(optimizer).step
    monkeypatch.setattr(type(optimizer), "step", lambda *a, **k: (traced.append(is_tracing()), step(*a, **k))[1])
    costs = measure_costs(model, loss_fn, optimizer, batch, rounds=1)
    assert traced
    assert not any(traced)
    assert all(layer.update > 0 for layer in costs.layers if layer.parameter_bytes)


@pytest.mark.parametrize(
    ("make", "form", "can"),
    [
        (optim.AdamW, {"fused": True}, True), (optim.AdamW, {"foreach": True}, False), (optim.AdamW, {}, False),
        (optim.SGD, {}, True), (optim.RMSprop, {}, False),
    ],
)  # fmt: skip
def test_updates_that_a_graph_can_hold(make, form, can):
    model = nn.Linear(2, 2)
    update = capturable_update(make(model.parameters(), lr=0.1, **form))
    assert (update is not None) == can


def test_nothing_is_traced(monkeypatch):
    monkeypatch.setattr(measure, "trace_operations", None)
    costs = measure_costs(*setting(), rounds=1)
    assert [layer.name for layer in costs.layers] == ["0", "2", "4"]


def test_a_step_that_cannot_be_seen_is_traced(caplog):
    """Who writes to a part of a tensor is not seen to have written the whole."""
    model, _, optimizer, batch = setting()

    def in_parts(model, x, y):
        made = torch.zeros_like(y)
        made[:100] = model(x[:100])
        return F.mse_loss(made, y)

    _logging._log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="gradweave"):
        costs = measure_costs(model, in_parts, optimizer, batch, rounds=1)
    assert any("the step is traced" in message for message in caplog.messages)
    assert [layer.name for layer in costs.layers] == ["0", "2", "4"]
    assert all(layer.forward > 0 and layer.weight_grad > 0 for layer in costs.layers)


def test_a_model_that_cannot_be_traced():
    """What Python decides from a value is part of the step as it ran."""
    model, loss_fn, optimizer, batch = setting()

    def decide(model, x, y):
        loss = loss_fn(model, x, y)
        return loss if loss.item() < 1e9 else 2 * loss

    assert len(measure_costs(model, decide, optimizer, batch, rounds=1).layers) == 3


def test_without_gradients():
    with torch.no_grad(), pytest.raises(GradweaveError, match="no_grad"):
        measure_costs(*setting())


def test_a_loss_of_several_elements():
    model, _, optimizer, batch = setting()
    with pytest.raises(GradweaveError, match="one element"):
        measure_costs(model, lambda m, x, _: m(x), optimizer, batch)


def is_tracing():
    return get_proxy_mode() is not None


def test_an_autocast_around_it_and_a_batch_that_is_changed(caplog):
    """Casts from before are not taken for those of the step, and the caller's batch stays as it is."""
    caplog.set_level("INFO", "gradweave")
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    x = torch.ones(3, 4)

    def loss_fn(model, x):
        x.mul_(2)
        return model(x).float().square().mean()

    with torch.autocast("cpu", torch.bfloat16):
        costs = measure_costs(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), (x,))
    assert len(costs.layers) >= 2
    assert "is traced" not in caplog.text
    assert torch.equal(x, torch.ones(3, 4))


def test_hooks_of_the_user_and_random_numbers_of_python_see_nothing():
    model, loss_fn, optimizer, batch = setting()
    seen = []
    model[0].register_forward_hook(lambda *_: seen.append("forward"))
    model[2].register_forward_pre_hook(lambda *_: seen.append("before"))
    model[4].register_full_backward_hook(lambda *_: seen.append("backward"))
    model.register_forward_pre_hook(lambda *_: random.seed(1))
    random.seed(0)
    measure_costs(model, loss_fn, optimizer, batch)
    assert seen == []
    assert random.random() == random.Random(0).random()
    model(batch[0])
    assert seen == ["forward", "before"]
