import copy
import gc
import warnings
import weakref

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

import gradweave
from compiler.models import MODELS, adamw, assert_identical, batches, loss_fn, make, train
from gradweave.errors import ArgumentError, GradweaveError, UnsupportedError

OPTIMIZERS = {
    "sgd": lambda p: optim.SGD(p, lr=0.05),
    "sgd, everything": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adam": lambda p: optim.Adam(p, lr=1e-2),
    "adam, amsgrad": lambda p: optim.Adam(p, lr=1e-2, amsgrad=True, weight_decay=0.01, maximize=True),
    "adamw": adamw,
    "adamw, foreach": lambda p: optim.AdamW(p, lr=1e-2, foreach=True),
    "nadam": lambda p: optim.NAdam(p, lr=1e-2),
    "adamax": lambda p: optim.Adamax(p, lr=1e-2),
    "adadelta": lambda p: optim.Adadelta(p, lr=1.0),
    "adagrad": lambda p: optim.Adagrad(p, lr=1e-2, lr_decay=0.01),
    "rmsprop": lambda p: optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    "rprop": lambda p: optim.Rprop(p, lr=1e-3),
}
CAPTURABLE_FORM = {"radam": lambda p: optim.RAdam(p, lr=1e-2), "asgd": lambda p: optim.ASGD(p, lr=1e-2)}


@pytest.mark.parametrize("model", MODELS)
def test_replay_is_the_eager_step_bit_for_bit(model):
    assert_identical(train(model, "replay"), train(model))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_replay_of_every_optimizer_is_the_eager_step_bit_for_bit(name):
    assert_identical(train("mlp", "replay", OPTIMIZERS[name]), train("mlp", None, OPTIMIZERS[name]))


@pytest.mark.parametrize("name", CAPTURABLE_FORM)
def test_optimizers_whose_eager_step_branches_on_a_count(name):
    made, expected = (train("mlp", lower, CAPTURABLE_FORM[name], steps=9) for lower in ("replay", None))
    torch.testing.assert_close(made[2], expected[2], rtol=1e-5, atol=0)


@pytest.mark.parametrize("model", [name for name in MODELS if "dropout" not in name])
def test_inductor_gives_the_eager_losses(model):
    made, expected = train(model, "inductor", steps=10), train(model, steps=10)
    torch.testing.assert_close(made[2], expected[2], rtol=1e-6 if model == "mlp" else 1e-5, atol=0)
    for (name, mine), theirs in zip(made[0].named_buffers(), expected[0].buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("name", [*OPTIMIZERS, *CAPTURABLE_FORM])
def test_inductor_with_every_optimizer_and_a_scheduler(name):
    def run(lower):
        return train(
            "linear",
            lower,
            {**OPTIMIZERS, **CAPTURABLE_FORM}[name],
            steps=7,
            max_norm=0.5,
            scheduler=lambda o: optim.lr_scheduler.ExponentialLR(o, 0.8),
        )

    made, expected = run("inductor"), run(None)
    torch.testing.assert_close(made[2], expected[2], rtol=1e-5, atol=0)
    for mine, theirs in zip(made[0].parameters(), expected[0].parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    state = made[1].state_dict()["state"]
    for index, entry in expected[1].state_dict()["state"].items():
        assert state[index].keys() == entry.keys()
        if "step" in entry:
            assert state[index]["step"] == entry["step"]


def test_an_optimizer_that_cannot_be_traced_is_named(warned):
    assert_identical(*(train("mlp", lower, lambda p: optim.Adafactor(p)) for lower in ("replay", None)))
    (message,) = warned()
    assert "Adafactor" in message
    assert "use another" in message


def test_hyperparameters_change_without_a_new_graph(caplog):
    def each(number, model, optimizer):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + number)
            group["momentum"] = 0.5 + 0.05 * number
            group["weight_decay"] = 0.01 * number if number else 0.02

    with caplog.at_level("INFO", logger="gradweave"):
        made = train("small", "inductor", OPTIMIZERS["sgd, everything"], each=each)
    torch.testing.assert_close(made[2], train("small", None, OPTIMIZERS["sgd, everything"], each=each)[2])
    assert sum("ready after" in record.message for record in caplog.records) <= 1


def test_a_number_that_opens_another_branch_makes_a_new_graph():
    def each(number, model, optimizer):
        optimizer.param_groups[0]["weight_decay"] = 0.0 if number < 3 else 0.1

    assert_identical(
        train("mlp", "replay", OPTIMIZERS["sgd, everything"], each=each),
        train("mlp", None, OPTIMIZERS["sgd, everything"], each=each),
    )


def test_groups_with_different_hyperparameters():
    def groups(params):
        params = list(params)
        return optim.AdamW([{"params": params[:2], "lr": 1e-3}, {"params": params[2:], "weight_decay": 0.3}], lr=1e-2)

    assert_identical(train("mlp", "replay", groups), train("mlp", None, groups))


def frozen_then_not(number, model, optimizer):
    model[0].requires_grad_(number >= 3)


def weights_changed(number, model, optimizer):
    if number == 3:
        with torch.no_grad():
            model[0].weight.mul_(0.5)
    if number == 4:
        model[0].weight.data.add_(0.1)
    if number == 5:
        model.load_state_dict({name: 0.9 * value for name, value in model.state_dict().items()})


def state_reloaded(number, model, optimizer):
    if number == 4:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def counts_changed(number, model, optimizer):
    if number == 4:
        for entry in optimizer.state.values():
            entry["step"].add_(10)


def one_count_changed(number, model, optimizer):
    if number == 4:
        next(iter(optimizer.state.values()))["step"].fill_(50)


def to_evaluation_and_back(number, model, optimizer):
    model.train(number % 2 == 0)


def looked_at(number, model, optimizer):
    optimizer.state_dict()
    copy.deepcopy(model)
    model.eval()
    with torch.no_grad():
        model(torch.ones(2, 48))
    model.train()


@pytest.mark.parametrize("lower", ["replay", "inductor"])
@pytest.mark.parametrize(
    "each",
    [
        frozen_then_not, weights_changed, state_reloaded, counts_changed, one_count_changed,
        to_evaluation_and_back, looked_at,
    ],
)  # fmt: skip
def test_what_is_done_between_steps_takes_effect(each, lower):
    name = "mlp" if lower == "replay" else "small"
    made, expected = (train(name, how, steps=8, each=each) for how in (lower, None))
    torch.testing.assert_close(made[2], expected[2], rtol=2e-6, atol=0)
    if lower == "replay":
        assert_identical(made, expected)


def test_extra_results_of_any_structure_belong_to_the_caller():
    def with_extras(model, x, y):
        out = model(x)
        return F.cross_entropy(out, y), {"correct": [(out.argmax(-1) == y).sum()], "x": x, "name": "n"}

    model = make("small")
    step = gradweave.compile(model, with_extras, adamw(model.parameters()), lower="inductor")
    results = [step(x, y) for x, y in batches(4)]
    losses = torch.stack([loss for loss, _ in results])
    assert len(losses.unique()) == 4
    assert not losses.requires_grad
    assert results[3][1]["name"] == "n"
    assert results[3][1]["correct"][0].shape == ()
    assert not torch.equal(results[2][1]["x"], results[3][1]["x"])


@pytest.mark.parametrize("lower", ["replay", "inductor"])
def test_accumulation_over_micro_batches(lower):
    name = "mlp" if lower == "replay" else "small"

    def run(lower):
        model = make(name)
        optimizer = adamw(model.parameters())
        step = gradweave.compile(model, loss_fn, optimizer, lower=lower, max_grad_norm=1.0) if lower else None
        norms = []
        for number, (x, y) in enumerate(batches(12)):
            last = number % 3 == 2
            if step and not last:
                with step.no_update():
                    step(x, y)
            elif step:
                step(x, y)
                norms.append(step.grad_norm)
            else:
                loss_fn(model, x, y).backward()
                if last:
                    norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
                    optimizer.step()
                    optimizer.zero_grad()
        return model, optimizer, torch.stack(norms)

    made, expected = run(lower), run(None)
    torch.testing.assert_close(made[2], expected[2], rtol=1e-5, atol=0)
    if lower == "replay":
        assert_identical(made, expected)


def test_summed_gradients_can_be_seen_and_thrown_away():
    model = make("mlp")
    optimizer = adamw(model.parameters())
    step = gradweave.compile(model, loss_fn, optimizer, lower="replay")
    data = list(batches(5))
    step(*data[0])
    with step.no_update():
        step(*data[1])
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
        optimizer.zero_grad()
        step(*data[2])
    seen = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    loss_fn(model, *data[2]).backward()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), seen, strict=True))


def test_the_true_norm_is_available():
    model = make("mlp")
    step = gradweave.compile(model, loss_fn, adamw(model.parameters()), lower="replay", max_grad_norm=1e-3)
    data = list(batches(2))
    step(*data[0])
    twin = copy.deepcopy(model)
    loss_fn(twin, *data[1]).backward()
    step(*data[1])
    torch.testing.assert_close(step.grad_norm, nn.utils.get_total_norm([p.grad for p in twin.parameters()]))


def test_no_norm_without_clipping():
    model = make("mlp")
    step = gradweave.compile(model, loss_fn, adamw(model.parameters()), lower="replay")
    with pytest.raises(GradweaveError, match="max_grad_norm"):
        _ = step.grad_norm


def test_clipping_by_value():
    def run(lower):
        model = make("mlp")
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        step = gradweave.compile(model, loss_fn, optimizer, lower=lower, max_grad_value=1e-3) if lower else None
        for x, y in batches(4):
            if step:
                step(x, y)
                continue
            loss_fn(model, x, y).backward()
            nn.utils.clip_grad_value_(model.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer, torch.zeros(1)

    assert_identical(run("replay"), run(None))


def test_autocast_in_the_loss_function():
    def half(model, x, y):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        return F.cross_entropy(out.float(), y)

    assert_identical(train("mlp", "replay", loss=half), train("mlp", loss=half))


def test_dropout_is_fresh_in_every_step_and_follows_the_seed():
    def losses(seed):
        model = make("dropout")
        step = gradweave.compile(model, loss_fn, optim.SGD(model.parameters(), lr=1e-9), lower="inductor")
        x, y = next(batches(1))
        torch.manual_seed(seed)
        return torch.stack([step(x, y) for _ in range(5)])

    first = losses(3)
    assert len(first.unique()) == 5
    assert torch.equal(first, losses(3))
    assert not torch.equal(first[1:], losses(4)[1:])


def short_last_batch(new_shapes, lower="replay"):
    model = make("mlp" if lower == "replay" else "small")
    optimizer = adamw(model.parameters())
    step = gradweave.compile(model, loss_fn, optimizer, lower=lower, new_shapes=new_shapes)
    losses = []
    for number, (x, y) in enumerate(batches(8)):
        rows = 4 if number % 4 == 3 else 6
        losses.append(step(x[:rows], y[:rows]))
    return model, optimizer, torch.stack(losses)


@pytest.mark.parametrize("new_shapes", ["compile", "eager"])
def test_a_short_last_batch(new_shapes):
    model = make("mlp")
    optimizer = adamw(model.parameters())
    losses = []
    for number, (x, y) in enumerate(batches(8)):
        rows = 4 if number % 4 == 3 else 6
        loss = loss_fn(model, x[:rows], y[:rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    expected = model, optimizer, torch.stack(losses)
    assert_identical(short_last_batch(new_shapes), expected)
    torch.testing.assert_close(short_last_batch("pad")[2], expected[2], rtol=1e-5, atol=0)


def test_alternating_shapes_are_compiled_once_each(monkeypatch):
    from gradweave.compiler import lower

    made = []
    monkeypatch.setattr(lower, "compile_with_inductor", _counting(lower.compile_with_inductor, made))
    short_last_batch("compile", "inductor")
    assert len(made) == 4  # scalars and main graph, for two shapes


def _counting(function, calls):
    def counted(*args):
        calls.append(None)
        return function(*args)

    return counted


def test_more_shapes_than_variants(warned):
    model = make("mlp")
    optimizer = adamw(model.parameters())
    step = gradweave.compile(model, loss_fn, optimizer, lower="replay", variants=2)
    x, y = next(batches(1))
    for rows in (6, 6, 5):
        step(x[:rows], y[:rows])
    assert not warned()
    twin = copy.deepcopy(model)
    stock = adamw(twin.parameters())
    stock.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for rows in (3, 2, 3, 6, 5):
        expected = loss_fn(twin, x[:rows], y[:rows])
        expected.backward()
        stock.step()
        stock.zero_grad()
        assert torch.equal(step(x[:rows], y[:rows]), expected)
        assert (step.eager_reason is None) == (rows > 3)
    (message,) = warned()
    assert "variants=2" in message
    assert "pad batches" in message


class Branches(nn.Module):
    """Python control flow on a value."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(48, 5)

    def forward(self, x):
        out = self.inner(x)
        return out if out.sum() > 0 else 2 * out


@pytest.mark.parametrize("kind", ["branch", "item"])
def test_what_cannot_be_one_graph_runs_eagerly_and_is_named_with_file_and_line(kind, warned):
    def with_item(model, x, y):
        loss = loss_fn(model, x, y)
        print(loss.item())
        return loss

    def run(lower):
        torch.manual_seed(0)
        model = Branches() if kind == "branch" else make("mlp")
        optimizer = adamw(model.parameters())
        objective = with_item if kind == "item" else loss_fn
        step = gradweave.compile(model, objective, optimizer, lower=lower) if lower else None
        losses = []
        for x, y in batches(5):
            if step:
                losses.append(step(x, y))
                continue
            losses.append(objective(model, x, y))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer, torch.stack(losses).detach()

    assert_identical(run("replay"), run(None))
    (message,) = warned()
    assert "test_api.py" in message


def test_python_state_of_the_model_is_not_frozen_in():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(48, 5)
            self.scale = 1.0
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return self.inner(x) * self.scale

    def run(lower):
        torch.manual_seed(0)
        model = Scaled()
        optimizer = adamw(model.parameters())
        step = gradweave.compile(model, loss_fn, optimizer, lower=lower) if lower else None
        losses = []
        for number, (x, y) in enumerate(batches(6)):
            model.scale = 1.0 if number < 3 else 2.0
            if step:
                losses.append(step(x, y))
                continue
            losses.append(loss_fn(model, x, y))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer, torch.stack(losses).detach()

    made, expected = run("replay"), run(None)
    assert_identical(made, expected)
    assert made[0].calls == expected[0].calls


def test_schedulers_see_that_steps_were_taken():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train("mlp", "replay", scheduler=lambda o: optim.lr_scheduler.StepLR(o, 2))


def test_checkpoints_go_to_and_come_from_a_stock_loop():
    model, optimizer, _ = train("small", "inductor", steps=4)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    resumed = make("small")
    stock = adamw(resumed.parameters())
    resumed.load_state_dict(saved[0])
    stock.load_state_dict(saved[1])
    step = gradweave.compile(model, loss_fn, optimizer, lower="replay")
    for x, y in batches(3):
        loss_fn(resumed, x, y).backward()
        stock.step()
        stock.zero_grad()
        step(x, y)
    assert_identical((model, optimizer, torch.zeros(1)), (resumed, stock, torch.zeros(1)))


BAD = {
    "lower": ({"lower": "xla"}, "lower='xla'.*inductor, replay"),
    "new_shapes": ({"new_shapes": "crop"}, "new_shapes='crop'"),
    "variants": ({"variants": 0}, "variants=0"),
    "memory_budget": ({"memory_budget": 1.5}, r"memory_budget=1.5.*0 to 1"),
    "max_grad_norm": ({"max_grad_norm": -1.0}, "max_grad_norm=-1.0.*positive"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name):
    options, message = BAD[name]
    model = make("mlp")
    with pytest.raises(ArgumentError, match=message):
        gradweave.compile(model, loss_fn, adamw(model.parameters()), **options)


def test_what_is_refused_at_once():
    model = make("mlp")
    with pytest.raises(UnsupportedError, match="LBFGS"):
        gradweave.compile(model, loss_fn, optim.LBFGS(model.parameters()))
    with pytest.raises(UnsupportedError, match="DataParallel"):
        gradweave.compile(nn.DataParallel(model), loss_fn, adamw(model.parameters()))
    hooked = adamw(model.parameters())
    hooked.register_step_pre_hook(lambda *_: None)
    with pytest.raises(UnsupportedError, match="step hooks"):
        gradweave.compile(model, loss_fn, hooked)


@pytest.mark.parametrize("lower", ["replay", "inductor"])
def test_a_step_that_is_dropped_leaves_nothing_behind(lower):
    model = make("small")
    step = gradweave.compile(model, loss_fn, adamw(model.parameters()), lower=lower)
    for x, y in batches(3):
        step(x, y)
    left = [weakref.ref(step), weakref.ref(model), weakref.ref(model[0].weight)]
    del step, model
    gc.collect()
    assert [ref() is None for ref in left] == [True, True, True]


def test_fuse_and_compile_refuse_each_other():
    model = make("mlp")
    optimizer = adamw(model.parameters())
    with gradweave.fuse(model, optimizer, "forward"), pytest.raises(UnsupportedError, match="is fused"):
        gradweave.compile(model, loss_fn, optimizer)
    step = gradweave.compile(model, loss_fn, optimizer, lower="replay")
    with pytest.raises(UnsupportedError, match="compiled step"):
        gradweave.fuse(model, optimizer, "forward")
    del step
    gc.collect()
    gradweave.fuse(model, optimizer, "forward").detach()


def test_a_step_without_gradients_is_refused():
    model = make("mlp")
    step = gradweave.compile(model, loss_fn, adamw(model.parameters()), lower="replay")
    with torch.no_grad(), pytest.raises(GradweaveError, match="no_grad"):
        step(*next(batches(1)))


@pytest.mark.parametrize("lower", ["replay", "inductor"])
@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_loss_scaling_leaves_out_updates_that_are_not_finite(lower, max_norm):
    name = "mlp" if lower == "replay" else "small"

    def run(lower):
        model = make(name)
        optimizer = adamw(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        step = None
        if lower:
            step = gradweave.compile(model, loss_fn, optimizer, lower=lower, scaler=scaler, max_grad_norm=max_norm)
        scales = []
        for number, (x, y) in enumerate(batches(10)):
            if number in (0, 5):
                x = x * float("inf")
            if step:
                step(x, y)
            else:
                scaler.scale(loss_fn(model, x, y)).backward()
                scaler.unscale_(optimizer)
                if max_norm is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            scales.append(scaler.get_scale())
        return model, optimizer, torch.tensor(scales)

    made, expected = run(lower), run(None)
    assert torch.equal(made[2], expected[2])
    assert len(expected[2].unique()) == 2
    assert all(entry["step"] == 8 for entry in made[1].state_dict()["state"].values())
    if lower == "replay":
        assert_identical(made, expected)
    for mine, theirs in zip(made[0].parameters(), expected[0].parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_two_steps_take_turns():
    def run(lower):
        torch.manual_seed(0)
        maker, judge = nn.Linear(4, 48), nn.Linear(48, 1)
        both = nn.ModuleDict({"maker": maker, "judge": judge})
        optimizers = adamw(maker.parameters()), adamw(judge.parameters())

        def fool(model, z):
            return -model["judge"](model["maker"](z)).mean()

        def tell(model, x, z):
            return model["judge"](model["maker"](z).detach()).mean() - model["judge"](x).mean()

        steps = None
        if lower:
            steps = [gradweave.compile(both, f, o, lower=lower) for f, o in zip((fool, tell), optimizers, strict=True)]
        losses = []
        for x, _ in batches(5):
            for index, batch in enumerate(((x[:, :4],), (x, x[:, :4]))):
                if steps:
                    losses.append(steps[index](*batch))
                    continue
                both.zero_grad()
                losses.append((fool, tell)[index](both, *batch))
                losses[-1].backward()
                optimizers[index].step()
        both.zero_grad()
        return both, optimizers[0], torch.stack(losses).detach()

    assert_identical(run("replay"), run(None))


def test_a_model_that_is_compiled_already():
    model = make("mlp")
    optimizer = adamw(model.parameters())
    step = gradweave.compile(torch.compile(model, backend="aot_eager"), loss_fn, optimizer, lower="replay")
    losses = torch.stack([step(x, y) for x, y in batches(6)])
    assert_identical((model, optimizer, losses), train("mlp"))


def test_gradients_that_are_there_already_count():
    def run(lower):
        model = make("mlp")
        optimizer = adamw(model.parameters())
        step = gradweave.compile(model, loss_fn, optimizer, lower=lower) if lower else None
        for number, (x, y) in enumerate(batches(6)):
            if number in (0, 3):
                for p in model.parameters():
                    p.grad = torch.full_like(p, 0.01)
            if step:
                step(x, y)
                continue
            loss_fn(model, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())
        return model, optimizer, torch.zeros(1)

    assert_identical(run("replay"), run(None))
