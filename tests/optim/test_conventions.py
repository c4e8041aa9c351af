"""The family as torch.optim.Optimizers: groups, schedulers, state dicts, hooks, and bad input."""

import copy
import io

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


@every
def test_many_tensors_at_once_give_the_same(cls):
    results = []
    for foreach in (True, False):
        model = make_conv().double()
        train(model, cls(model, foreach=foreach, weight_decay=0.1), [x.double() for x in images(3)])
        results.append(weights(model))
    assert torch.allclose(results[0], results[1], atol=1e-6)


@every
@pytest.mark.parametrize("mode", [{}, {"reference": True, "lr": 0.02}])
def test_resuming_is_bit_for_bit(cls, mode):
    batches = images(6)
    model = make_conv()
    optimizer = cls(model, **mode)
    train(model, optimizer, batches[:3])
    loss_of(model, batches[3]).backward()
    saved = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict(), [p.grad for p in model.parameters()]), saved)
    saved.seek(0)
    states = torch.load(saved, weights_only=True)
    optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer, batches[4:])
    other = make_conv(seed=1)
    resumed = cls(other, **mode)
    other.load_state_dict(states[0])
    resumed.load_state_dict(states[1])
    for p, grad in zip(other.parameters(), states[2], strict=True):
        p.grad = grad
    resumed.step()
    resumed.zero_grad()
    train(other, resumed, batches[4:])
    assert torch.equal(weights(model), weights(other))


@every
def test_vectors_of_low_precision_models_stay_precise_in_state_dicts(cls):
    model = make_mlp(torch.bfloat16)
    optimizer = cls(model)
    train(model, optimizer, rows(2, dtype=torch.bfloat16))
    other = cls(copy.deepcopy(model))
    other.load_state_dict(optimizer.state_dict())
    for group, others in zip(optimizer.param_groups, other.param_groups, strict=True):
        for p, q in zip(group["params"], others["params"], strict=True):
            for key, value in optimizer.state[p].items():
                if "vector" in key or key in ("record", "size"):
                    assert value.dtype == other.state[q][key].dtype == torch.float32
                    assert torch.equal(value, other.state[q][key])


@every
def test_a_state_dict_can_be_loaded_before_the_first_step(cls):
    model = make_mlp()
    optimizer = cls(model)
    optimizer.load_state_dict(optimizer.state_dict())
    expected = make_mlp()
    assert train(model, optimizer, rows()) == train(expected, cls(expected), rows())


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


@pytest.mark.parametrize("rule", ["sgd", "adamw"])
@pytest.mark.parametrize("maximize", [True, False])
def test_the_first_order_rule_is_torchs(rule, maximize):
    torch.manual_seed(0)
    model = Mixed()
    other = copy.deepcopy(model)
    options = {"first_order": rule, "first_order_lr": 0.01, "first_order_weight_decay": 0.1, "maximize": maximize}
    optimizer = EvaF(model, **options)
    others = [other.embedding.weight, *other.norm.parameters(), other.scale]
    settings = {"lr": 0.01, "weight_decay": 0.1, "maximize": maximize}
    stock = (
        torch.optim.AdamW(others, **settings) if rule == "adamw" else torch.optim.SGD(others, momentum=0.9, **settings)
    )
    for step in range(4):
        x = torch.tensor([0, 1, 2, step])
        loss_of(model, x).backward()
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            q.grad = p.grad.clone()
        optimizer.step()
        stock.step()
        optimizer.zero_grad()
        for p in (model.linear.weight, model.linear.bias):
            p.data.zero_()
    for name in ("embedding.weight", "norm.weight", "norm.bias", "scale"):
        assert torch.allclose(model.get_parameter(name), other.get_parameter(name), atol=1e-6)


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
    optimizer.register_step_post_hook(lambda *_: calls.append("behind"))

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, rows(1)[0])
        loss.backward()
        return loss

    first = optimizer.step(closure).item()
    assert optimizer.step(closure).item() < first
    assert calls == ["before", "behind"] * 2


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


@captured
def test_layers_without_gradient_are_skipped(cls):
    model = nn.ModuleList([make_mlp(), nn.Linear(3, 3)])
    optimizer = cls(model)
    before = model[1].weight.clone()
    train(model[0], optimizer, rows(2))
    model[0][0].requires_grad_(False)
    frozen = model[0][0].weight.clone()
    train(model[0], optimizer, rows(2))
    assert torch.equal(before, model[1].weight)
    assert torch.equal(frozen, model[0][0].weight)


@captured
def test_gradients_that_are_thrown_away_take_their_vectors_with_them(cls):
    model, other = make_mlp(), make_mlp()
    first, second = cls(model), cls(other)
    loss_of(model, rows(1)[0] * 100).backward()
    first.zero_grad()
    assert train(model, first, rows()) == train(other, second, rows())


@captured
def test_a_step_uses_its_vectors_up_whoever_drops_the_gradients(cls):
    model, other = make_mlp(), make_mlp()
    optimizer = cls(model)
    for x in rows():
        loss_of(model, x).backward()
        optimizer.step()
        model.zero_grad()
    train(other, cls(other), rows())
    assert torch.equal(weights(model), weights(other))


@captured
def test_micro_batches_give_the_step_of_the_batch(cls):
    model, other = make_mlp(torch.float64), make_mlp(torch.float64)
    options = {} if cls is EvaF else {"faithful": True, "lr": 0.02}
    whole, parts = cls(model, **options), cls(other, **options)
    for x in rows(3, dtype=torch.float64):
        train(model, whole, [x])
        for part in x.split(4):
            (loss_of(other, part) / 3).backward()
        parts.step()
        parts.zero_grad()
    assert torch.allclose(weights(model), weights(other), atol=1e-10)


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


def test_absolute_damping_takes_the_scale_off_output_vectors_or_refuses():
    model, other = make_mlp(), make_mlp()
    plain, scaled = (Eva(m, reference=True, lr=0.02) for m in (model, other))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    train(model, plain, rows(2))
    for x in rows(2):
        scaler.scale(loss_of(other, x)).backward()
        scaler.step(scaled)
        scaler.update()
        scaled.zero_grad()
    assert torch.allclose(weights(model), weights(other), atol=1e-6)
    weight = model[0].weight, other[0].weight
    assert torch.allclose(plain.state[weight[0]]["output_vector"], scaled.state[weight[1]]["output_vector"], rtol=1e-3)
    scaler.scale(loss_of(other, rows(1)[0])).backward()
    scaler.unscale_(scaled)
    with pytest.raises(GradweaveError, match="does not tell an optimizer the scale"):
        scaler.step(scaled)


@captured
def test_copies_and_detached_optimizers_refuse_to_step(cls):
    model = make_mlp()
    optimizer = cls(model)
    clone = copy.deepcopy(optimizer)
    for p in (p for group in clone.param_groups for p in group["params"]):
        p.grad = torch.ones_like(p)
    with pytest.raises(GradweaveError, match="has no hooks on a model"):
        clone.step()
    optimizer.detach()
    loss_of(model, rows(1)[0]).backward()
    with pytest.raises(GradweaveError, match="has no hooks on a model"):
        optimizer.step()


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


def test_channels_last():
    model, other = make_conv(), make_conv().to(memory_format=torch.channels_last)
    train(model, Eva(model), images(3))
    train(other, Eva(other), [x.to(memory_format=torch.channels_last) for x in images(3)])
    assert torch.allclose(weights(model), weights(other), atol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"damping": 0.0}, "damping=0.0: give a positive number"),
        ({"lr": -1.0}, "lr=-1.0"),
        ({"lr": torch.ones(2)}, "give a tensor of one element"),
        ({"momentum": -0.1}, "momentum=-0.1"),
        ({"running_average": 0.0}, "running_average=0.0"),
        ({"kl_clip": 0.0}, "kl_clip=0.0"),
        ({"first_order": "lion"}, "use one of sgd, adamw"),
        ({"faithful": True, "reference": True}, "not both"),
    ],
)
@every
def test_bad_arguments_are_named(cls, arguments, message):
    with pytest.raises(ArgumentError, match=message):
        cls(make_mlp(), **arguments)


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
def test_distributed_checkpoints_find_every_state_by_its_parameters_name(cls):
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    model = make_conv()
    optimizer = cls(model)
    before = weights(model)
    state = get_optimizer_state_dict(model, optimizer)
    assert torch.equal(before, weights(model))
    assert "mix.weight" in state["state"]
    train(model, optimizer, images(2))
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    other = copy.deepcopy(model)
    resumed = cls(other)
    set_optimizer_state_dict(other, resumed, saved)
    train(model, optimizer, images(2))
    train(other, resumed, images(2))
    assert torch.equal(weights(model), weights(other))


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


@every
@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"damping": 0.0}, "damping="), ({"damping": float("nan")}, "damping="), ({"lr": -1}, "lr="),
        ({"running_average": 0.0}, "running_average="), ({"betas": (1.5, 0.9)}, "betas="), ({"eps": -1}, "eps="),
        ({"rule": "adam"}, "rule="),
    ],
)  # fmt: skip
def test_bad_arguments_of_groups_are_named(cls, group, message):
    model = make_mlp()
    with pytest.raises(ArgumentError, match=message):
        cls(model, [{"params": list(model.parameters()), **group}])


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


@captured
def test_groups_of_layers_in_any_order_with_no_limit(cls):
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    params = [*model[1].parameters(), *model[0].parameters()]
    optimizer = cls(model, [{"params": params, "rule": "vectors"}], faithful=True, kl_clip=float("inf"), lr=1e-3)
    loss_of(model, torch.randn(6, 4)).backward()
    optimizer.step()
    assert weights(model).isfinite().all()


@every
def test_empty_parameters(cls):
    model = nn.Sequential(nn.Linear(4, 3))
    model.empty = nn.Parameter(torch.zeros(0, 3))
    optimizer = cls(model)
    (loss_of(model, torch.randn(6, 4)) + model.empty.sum()).backward()
    optimizer.step()
    assert weights(model).isfinite().all()


@every
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": "0.1"}, "lr='0.1'"),
        ({"momentum": 2}, "momentum=2"),
        ({"momentum": 1.0}, "momentum=1.0"),
        ({"weight_decay": "no"}, "weight_decay='no'"),
        ({"damping": "0.1"}, "damping='0.1'"),
        ({"first_order_lr": "0.1"}, "first_order_lr='0.1'"),
        ({"first_order_lr": -1}, "first_order_lr=-1"),
        ({"betas": 0.9}, "betas=0.9"),
        ({"betas": ("0.9", 0.99)}, "betas='0.9'"),
        ({"running_average": [1]}, "running_average="),
        ({"params": 0.1}, "params=0.1: give parameters"),
        ({"params": "weight"}, "params='weight'"),
    ],
)
def test_what_is_no_number_is_refused_and_leaves_no_hook(cls, arguments, message):
    model = make_mlp()
    with pytest.raises(ArgumentError, match=message):
        cls(model, **arguments)
    assert not any(module._forward_hooks for module in model.modules())


FAILING = [
    "gradweave.optim.eva.FusedStep",
    "gradweave.optim.eva._StatisticsOptimizer._attach",
    "gradweave.optim.base.VectorOptimizer.add_param_group",
    "gradweave.optim.statistics.coverage.hook_output_projections",
    "gradweave.optim.base.VectorOptimizer._enlist",
]


@pytest.mark.parametrize("failing", FAILING)
@captured
def test_an_optimizer_that_cannot_be_made_leaves_no_hook(cls, failing, monkeypatch):
    """Each step of making one fails in turn."""

    def fail(*_, **__):
        raise RuntimeError("failed")

    attention = nn.MultiheadAttention(8, 2)
    model = nn.ModuleList([make_mlp(), attention])
    with monkeypatch.context() as patch:
        patch.setattr(failing, fail)
        with pytest.raises(RuntimeError, match="failed"):
            cls(model)
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    cls(model)


@captured
def test_a_hook_that_cannot_be_put_on_takes_the_others_along(cls, monkeypatch):
    model = make_mlp()
    stuck = model[4]
    monkeypatch.setattr(stuck, "register_forward_hook", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cls(model)
    assert not any(module._forward_hooks for module in model.modules())
