import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

import gradweave
from compiler.models import MODELS, adamw, assert_identical, batches, both, loss_fn, make, train
from gradweave.compiler import api as step_module
from gradweave.errors import GradweaveError, UnsupportedError


@pytest.mark.parametrize("model", MODELS)
def test_replay_is_the_eager_step_bit_for_bit(model):
    assert_identical(train(model, "replay"), train(model))


@pytest.mark.parametrize("model", [name for name in MODELS if "dropout" not in name])
def test_inductor_gives_the_eager_losses(model):
    made, expected = train(model, "inductor", steps=10), train(model, steps=10)
    torch.testing.assert_close(made[2], expected[2], rtol=1e-6 if model == "mlp" else 1e-5, atol=0)
    for (name, mine), theirs in zip(made[0].named_buffers(), expected[0].buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5, msg=name)


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


def test_autocast_in_the_loss_function():
    def half(model, x, y):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        return F.cross_entropy(out.float(), y)

    assert_identical(train("mlp", "replay", loss=half), train("mlp", loss=half))


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


def test_batches_by_name():
    def run(lower):
        model = make("mlp")
        optimizer = adamw(model.parameters())
        objective = lambda model, **batch: F.cross_entropy(model(batch["x"]), batch["y"])  # noqa: E731
        step = gradweave.compile(model, objective, optimizer, lower=lower, new_shapes="pad") if lower else None
        losses = []
        for number, (x, y) in enumerate(batches(6)):
            batch = {"x": x[: 6 - number % 2], "y": y[: 6 - number % 2]}
            if step:
                losses.append(step(**batch))
                continue
            losses.append(objective(model, **batch))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.stack(losses).detach(), step

    (made, step), (expected, _) = run("replay"), run(None)
    torch.testing.assert_close(made, expected, rtol=1e-5, atol=0)
    assert step.eager_reason is None


def left_behind(model, optimizer):
    """Everything that could be left on a model and an optimizer."""
    hooks = [
        dict(value) for module in model.modules() for name, value in vars(module).items() if "hook" in name and value
    ]
    marks = [name for name in vars(optimizer) if "gradweave" in name]
    instance = [name for module in model.modules() for name in vars(module) if name == "forward"]
    return hooks, marks, instance, [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    "part",
    [
        "check_options",
        "check_step",
        "check_loss_fn",
        "StepState",
        "EagerFallback",
        "Parts",
        "CapturedParts",
        "dynamo_compile",
    ],
)
def test_a_compile_that_fails_leaves_nothing_behind(part, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("on purpose")

    model = make("mlp")
    optimizer = adamw(model.parameters())
    with monkeypatch.context() as patch:
        patch.setattr(step_module, part, broken)
        with pytest.raises(RuntimeError, match="on purpose"):
            gradweave.compile(model, loss_fn, optimizer)
    assert left_behind(model, optimizer) == ([], [], [], [])
    gradweave.fuse(model, optimizer, "forward").detach()


@pytest.mark.parametrize("where", ["forward", "loss", "backward"])
def test_a_first_step_that_fails_leaves_a_model_that_trains(where):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ValueError("on purpose")

    bad = [True]

    def objective(model, x, y):
        if bad[0] and where == "forward":
            raise ValueError("on purpose")
        loss = loss_fn(model, x, y)
        if bad[0] and where == "loss":
            return loss.expand(2)
        return Fails.apply(loss) if bad[0] else loss

    model = make("mlp")
    optimizer = adamw(model.parameters())
    step = gradweave.compile(model, objective, optimizer, lower="replay")
    before = [p.detach().clone() for p in model.parameters()]
    claims = left_behind(model, optimizer)[0]
    with pytest.raises((ValueError, GradweaveError)):
        step(*next(batches(1)))
    assert all(map(torch.equal, before, model.parameters()))
    assert not optimizer.state
    assert left_behind(model, optimizer)[0] == claims
    bad[0] = False
    for batch in batches(3):
        step(*batch)
    assert step.eager_reason is None
    step.detach()
    assert left_behind(model, optimizer) == ([], [], [], [])


def test_wrapped_optimizers_of_accelerate():
    import accelerate

    made = []
    for wrapped in (True, False):
        model = make("mlp")
        optimizer = adamw(model.parameters())
        given = accelerate.Accelerator(cpu=True).prepare(optimizer) if wrapped else optimizer
        step = gradweave.compile(model, loss_fn, given, lower="replay")
        made.append((model, optimizer, torch.stack([step(x, y) for x, y in batches(4)])))
    assert_identical(*made)


def test_wrapped_optimizers_of_lightning():
    from lightning.pytorch.core.optimizer import LightningOptimizer

    model = make("mlp")
    optimizer = adamw(model.parameters())
    step = gradweave.compile(model, loss_fn, LightningOptimizer(optimizer), lower="replay")
    losses = torch.stack([step(x, y) for x, y in batches(4)])
    assert step.optimizer is optimizer
    assert len(losses.unique()) == 4


def test_dynamo_that_is_switched_off(monkeypatch):
    with torch.compiler.set_stance("force_eager"):
        made, expected, _ = both(lambda: make("mlp"), loss_fn, list(batches(4)))
    assert_identical(made, expected)


def test_a_step_is_neither_copied_nor_saved():
    model = make("mlp")
    step = gradweave.compile(model, loss_fn, adamw(model.parameters()))
    with pytest.raises(GradweaveError, match="cannot be copied"):
        copy.deepcopy(step)
    with pytest.raises(GradweaveError, match="cannot be saved"):
        pickle.dumps(step)


def test_a_loss_of_many_elements_is_refused():
    model = make("mlp")
    step = gradweave.compile(model, lambda model, x, y: model(x), adamw(model.parameters()))
    with pytest.raises(GradweaveError, match="one element"):
        step(*next(batches(1)))


def test_tensors_of_a_batch_that_require_a_gradient_get_it(warned):
    def run(lower):
        model = make("small")
        optimizer = adamw(model.parameters())
        step = gradweave.compile(model, loss_fn, optimizer, lower=lower) if lower else None
        losses, inputs = [], []
        for number, (x, y) in enumerate(batches(6)):
            x.requires_grad_(number in (0, 3))
            inputs.append(x)
            if step:
                losses.append(step(x, y))
                continue
            losses.append(loss_fn(model, x, y))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        return (model, optimizer, torch.stack(losses).detach()), [x.grad for x in inputs]

    (made, grads), (expected, other) = run("replay"), run(None)
    assert_identical(made, expected)
    assert [g is None for g in grads] == [g is None for g in other]
    assert all(torch.equal(a, b) for a, b in zip(grads, other, strict=True) if a is not None)
    (message,) = warned()
    assert "a tensor of the batch requires a gradient" in message


def test_a_model_that_loss_fn_calls_besides_gets_no_gradients():
    torch.manual_seed(0)
    maker, judge = nn.Linear(4, 6), nn.Linear(6, 1)
    step = gradweave.compile(maker, lambda maker, z: -judge(maker(z)).mean(), adamw(maker.parameters()), lower="replay")
    for _ in range(3):
        step(torch.ones(2, 4))
        assert all(p.grad is None for p in judge.parameters())
    judge.weight.grad = torch.ones_like(judge.weight)
    with torch.compiler.set_stance("force_eager"):
        step(torch.ones(2, 4))
    assert torch.equal(judge.weight.grad, torch.ones_like(judge.weight))
