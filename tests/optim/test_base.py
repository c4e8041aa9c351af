"""The family as torch.optim.Optimizers: groups, schedulers, hooks, scalers, and models that are refused."""

import copy

import pytest
import torch
from torch import nn

from gradweave.errors import ArgumentError, GradweaveError, UnsupportedError
from gradweave.fusion import fuse
from gradweave.optim import Eva, EvaF, EvaS
from optim.models import images, loss_of, make_conv, make_mlp, rows, train, weights

FAMILY = [Eva, EvaF, EvaS]


CAPTURED = [Eva, EvaF]


every = pytest.mark.parametrize("cls", FAMILY)


captured = pytest.mark.parametrize("cls", CAPTURED)


class Mixed(nn.Module):
    """Layers, an embedding, a norm and a lone parameter."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.linear = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.linear(self.norm(self.embedding(x))) * self.scale


@every
@pytest.mark.parametrize("mode", [{}, {"faithful": True}, {"reference": True}])
def test_losses_fall(cls, mode):
    model = make_conv()
    batch = images(1)[0]
    losses = train(model, cls(model, **({} if mode == {} else {"lr": 0.02}), **mode), [batch] * 25)
    assert losses[-1] < 0.9 * losses[0]


@captured
def test_what_has_no_vectors_goes_to_the_first_order_rule(cls):
    model = Mixed()
    optimizer = cls(model, lr=0.02, weight_decay=0.1, first_order_weight_decay=0.3)
    covered, rest = optimizer.param_groups
    assert [p.shape for p in covered["params"]] == [(3, 4), (3,)]
    assert covered["rule"] == "vectors"
    assert rest["rule"] == "adamw"
    assert (rest["lr"], rest["lr_ratio"]) == (0.02, 0.05)
    assert rest["weight_decay"] == 0.3
    assert len(rest["params"]) == 4


@captured
def test_groups_of_ones_own(cls):
    model = make_mlp()
    groups = [
        {"params": [model[0].weight, model[0].bias], "lr": 0.01},
        {"params": [model[2].bias], "weight_decay": 0.0},
        {"params": [model[2].weight], "damping": 0.5},
    ]
    optimizer = cls(model, groups, lr=0.02, weight_decay=0.2)
    assert [(g["rule"], len(g["params"])) for g in optimizer.param_groups] == [
        ("vectors", 2), ("adamw", 1), ("vectors", 1),
    ]  # fmt: skip
    before = model[4].weight.clone()
    train(model, optimizer, rows(2))
    assert torch.equal(before, model[4].weight)
    optimizer.add_param_group({"params": [model[4].weight]})
    train(model, optimizer, rows(2))
    assert not torch.equal(before, model[4].weight)
    assert optimizer.state[model[4].weight]["input_vector"].count_nonzero() > 0


@every
def test_names_of_parameters_are_kept(cls):
    model = make_mlp()
    optimizer = cls(model, list(model.named_parameters()))
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())


@every
def test_schedulers_and_tensor_rates(cls):
    results = []
    for lr in (0.02, torch.tensor(0.02)):
        model = make_mlp()
        optimizer = cls(model, lr=lr)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for x in rows():
            train(model, optimizer, [x])
            scheduler.step()
        assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.02 * 0.5**4)
        results.append(weights(model))
    assert torch.allclose(results[0], results[1], atol=1e-7)


@every
def test_step_hooks_and_closures_run(cls):
    model = make_mlp()
    optimizer = cls(model)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, rows(1)[0])
        loss.backward()
        return loss

    first = optimizer.step(closure).item()
    assert optimizer.step(closure).item() < first
    assert calls == ["before", "after"] * 2


@every
def test_maximizing_is_minimizing_the_negative(cls):
    model, other = make_mlp(), make_mlp()
    train(model, cls(model), rows())
    train(other, cls(other, maximize=True), rows(), loss=lambda m, x: -loss_of(m, x))
    assert torch.allclose(weights(model), weights(other), atol=1e-6)


@every
@pytest.mark.parametrize("mode", [{}, {"reference": True, "lr": 0.02}, {"faithful": True, "lr": 0.02}])
@pytest.mark.parametrize("foreach", [True, False])
def test_a_gradient_that_is_not_finite_changes_nothing(cls, mode, foreach):
    model = make_mlp()
    optimizer = cls(model, foreach=foreach, **mode)
    train(model, optimizer, rows(2))
    before, state = weights(model), copy.deepcopy(optimizer.state_dict()["state"])
    for bad in (float("nan"), float("inf")):
        loss_of(model, rows(1)[0]).backward()
        model[2].weight.grad[0, 0] = bad
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(before, weights(model))
    for index, entry in optimizer.state_dict()["state"].items():
        for key, value in entry.items():
            assert value is state[index][key] or torch.equal(torch.as_tensor(value), torch.as_tensor(state[index][key]))
    train(model, optimizer, rows(2))
    assert torch.isfinite(weights(model)).all()


@every
@pytest.mark.parametrize("mode", [{}, {"reference": True, "lr": 0.02}, {"faithful": True, "lr": 0.02}])
def test_zeros_everywhere_never_make_nan(cls, mode):
    model = make_conv()
    optimizer = cls(model, **mode)
    for x in (torch.zeros(4, 4, 8, 8), torch.zeros(4, 4, 8, 8), images(1)[0]):
        (model(x) * 0).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.isfinite(weights(model)).all()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    train(model, optimizer, images(2))
    assert torch.isfinite(weights(model)).all()


@every
def test_a_layer_of_zeros_learns(cls):
    model = make_mlp()
    nn.init.zeros_(model[4].weight)
    train(model, cls(model), rows(2))
    assert model[4].weight.count_nonzero() > 0


@every
@pytest.mark.parametrize("unscale", [True, False])
def test_gradient_scaling(cls, unscale):
    model, other = make_mlp(), make_mlp()
    plain, scaled = cls(model), cls(other)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    batches = rows(6)
    for number, x in enumerate(batches):
        if number == 3:
            scaler.scale(loss_of(other, x) * float("inf")).backward()
        else:
            train(model, plain, [x])
            scaler.scale(loss_of(other, x)).backward()
        if unscale:
            scaler.unscale_(scaled)
        scaler.step(scaled)
        scaler.update()
        scaled.zero_grad()
    assert torch.allclose(weights(model), weights(other), atol=1e-5)
    assert scaler.get_scale() == 2.0**11


@pytest.mark.parametrize("cls", FAMILY)
@pytest.mark.parametrize("trained", [True, False])
def test_fusion_in_backward_is_refused(cls, trained):
    model = make_mlp()
    optimizer = cls(model)
    if trained:
        train(model, optimizer, rows(2))
    with pytest.raises(ArgumentError, match=r'mode=.*use mode="forward"'):
        fuse(model, optimizer, "backward")
    with pytest.raises(ArgumentError, match=r'allow_backward=.*use mode="forward"'):
        fuse(model, optimizer, allow_backward=True)
    with fuse(model, optimizer, "auto"):
        train(model, optimizer, rows(2))
    train(model, optimizer, rows(1))


def test_some_of_the_parameters_are_refused():
    model = make_mlp()
    optimizer = Eva(model)
    loss_of(model, rows(1)[0]).backward()
    group = optimizer.param_groups[0]
    group["params"] = group["params"][:2]
    with pytest.raises(GradweaveError, match="all of them"):
        optimizer.step()


@every
def test_nothing_waits_for_the_device(cls, monkeypatch):
    model = make_mlp()
    optimizer = cls(model)
    train(model, optimizer, rows(2))

    def refuse(*_):
        raise AssertionError("a step read a value from the device")

    loss_of(model, rows(1)[0]).backward()
    for name in ("item", "tolist", "__bool__", "__float__", "__int__"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    optimizer.step()


@every
def test_steps_under_autocast_are_not_cast(cls):
    model, other = make_mlp(), make_mlp()
    one, two = cls(model), cls(other)
    for x in rows():
        train(model, one, [x])
        loss_of(other, x).backward()
        with torch.autocast("cpu", torch.bfloat16):
            two.step()
        two.zero_grad()
    assert torch.equal(weights(model), weights(other))


def test_models_without_layers_are_refused():
    for cls in FAMILY:
        with pytest.raises(UnsupportedError, match=r"use torch\.optim\.AdamW"):
            cls(nn.LayerNorm(3))
        with pytest.raises(ArgumentError, match="give the model"):
            cls(nn.LayerNorm(3).parameters())
    with pytest.raises(ArgumentError, match="samples=0"):
        EvaF(make_mlp(), samples=0)


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.parametrize("cls", [Eva, EvaF, EvaS])
def test_a_scripted_layer_has_no_vectors_where_its_forward_must_be_seen(cls):
    model = nn.Sequential(nn.Linear(3, 3), torch.jit.script(nn.Linear(3, 3)), nn.Linear(3, 2))
    optimizer = cls(model, lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    rules = {id(p): group["rule"] for group in optimizer.param_groups for p in group["params"]}
    assert [rules[id(model[i].weight)] == "vectors" for i in range(3)] == [True, cls is EvaS, True]


def test_sparse_gradients_are_refused():
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 3))
    optimizer = EvaF(model)
    model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(GradweaveError, match="is sparse"):
        optimizer.step()


@every
def test_sharded_models_are_refused(cls, tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = make_mlp()
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(UnsupportedError, match=r"FSDP: .*give an unsharded model"):
            cls(model)
    finally:
        torch.distributed.destroy_process_group()


@every
def test_all_groups_share_a_rate_that_is_changed_in_place_or_by_a_scheduler(cls):
    model = Mixed()
    lr = torch.tensor(0.02)
    optimizer = cls(model, lr=lr)
    lr.zero_()
    before = [p.detach().clone() for p in model.parameters()]
    loss_of(model, torch.arange(3)).backward()
    optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    optimizer = cls(model, lr=0.02)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.04, total_steps=10)
    assert len({group["lr"] for group in optimizer.param_groups}) == 1


@captured
def test_vectors_are_for_layers(cls):
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    with pytest.raises(ArgumentError, match="rule='vectors'"):
        cls(model, [{"params": [model[0].weight, model[1].weight], "rule": "vectors"}])
    with pytest.raises(ArgumentError, match="output_damping="):
        Eva(model, [{"params": list(model.parameters()), "output_damping": -1.0}])


@every
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_models_that_are_not_ready_are_refused(cls):
    with pytest.raises(UnsupportedError, match="lazy"):
        cls(nn.Sequential(nn.Linear(4, 3), nn.LazyLinear(2)))
    with pytest.raises(UnsupportedError, match="complex"):
        cls(nn.Linear(4, 3, dtype=torch.complex64))
    with pytest.raises(UnsupportedError, match=r"to train; use torch\.optim\.AdamW"):
        cls(nn.Linear(4, 0))


@every
def test_empty_parameters(cls):
    model = nn.Sequential(nn.Linear(4, 3))
    model.empty = nn.Parameter(torch.zeros(0, 3))
    optimizer = cls(model)
    (loss_of(model, torch.randn(6, 4)) + model.empty.sum()).backward()
    optimizer.step()
    assert weights(model).isfinite().all()
