"""Weights whose updates a step has left to the next one: every look at them is right, and nothing is lost."""

import copy
import gc
import io
import pickle
import threading
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import gradweave
from compiler.models import adamw, batches, loss_fn, make
from compiler.planned import layer_names, random_costs, train
from gradweave._runtime.deferred.pending_parameter import PendingParameter
from gradweave._runtime.deferred.pending_state import PendingState
from gradweave.compiler import lanes, left_work
from gradweave.errors import UnsupportedError

STEPS = 4


@pytest.fixture
def policy():
    return "forward_fusion"


@pytest.fixture
def left(policy):
    """A step that has left updates to the next one, and the weights and the state that are right."""
    costs = random_costs(layer_names(make("mlp")), 8)
    _, stock = train(make("mlp"), STEPS)  # first: before Dynamo compiles anything, what is left is done
    _, step = train(make("mlp"), STEPS, policy=policy, costs=costs)
    assert any(type(p) is PendingParameter for p in step.model.parameters())
    assert type(step.optimizer.state) is PendingState
    return step, stock


def right(step):
    return [p.detach().clone() for p in step.model.parameters()]


def as_list(state):
    return [state[name] for name in state]


LOOKS = {
    "values": lambda step: [p.tolist() for p in step.model.parameters()],
    "detach": lambda step: [p.detach().clone() for p in step.model.parameters()],
    "data": lambda step: [p.data.clone() for p in step.model.parameters()],
    "numpy": lambda step: [p.detach().numpy().tolist() for p in step.model.parameters()],
    "state_dict": lambda step: as_list(step.model.state_dict()),
    "deepcopy": lambda step: list(copy.deepcopy(step.model).parameters()),
    "pickle": lambda step: list(pickle.loads(pickle.dumps(step.model)).parameters()),
    "forward": lambda step: [step.model(x) for x, _ in batches(1)],
    "evaluation": lambda step: [step.model.eval()(x) for x, _ in batches(1)],
    "functional_call": lambda step: [
        torch.func.functional_call(step.model, dict(step.model.named_parameters()), (x,)) for x, _ in batches(1)
    ],
    "vmap": lambda step: [torch.func.vmap(step.model)(x) for x, _ in batches(1)],
    "norm": lambda step: [nn.utils.parameters_to_vector(step.model.parameters())],
    "flush": lambda step: step.flush() or list(step.model.parameters()),
    "detached": lambda step: step.detach() or list(step.model.parameters()),
    "optimizer state": lambda step: [
        value.clone() for state in step.optimizer.state.values() for value in state.values()
    ],
    "optimizer state_dict": lambda step: [
        value for state in step.optimizer.state_dict()["state"].values() for value in state.values()
    ],
    "scripted": lambda step: [torch.jit.trace(step.model, x, check_trace=False)(x) for x, _ in batches(1)],
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_every_look_is_right(look, left):
    step, stock = left
    for mine, theirs in zip(LOOKS[look](step), LOOKS[look](stock), strict=True):
        assert mine == theirs if isinstance(mine, list) else torch.equal(mine, theirs)
    assert all(type(p) is nn.Parameter for p in step.model.parameters())
    assert type(step.optimizer.state) is not PendingState


def test_a_look_from_another_thread(left):
    step, stock = left
    seen = []
    thread = threading.Thread(target=lambda: seen.extend(p.tolist() for p in step.model.parameters()))
    thread.start()
    thread.join()
    assert seen == [p.tolist() for p in stock.model.parameters()]


def test_a_look_under_autocast_and_inference_mode(left):
    step, stock = left
    x, _ = next(batches(1))
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        mine, theirs = step.model(x), stock.model(x)
    assert torch.equal(mine, theirs)
    assert all(torch.equal(one, other) for one, other in zip(right(step), right(stock), strict=True))


def go_on(step, stock, count=3):
    for batch in batches(count):
        assert torch.equal(step(*batch), stock(*batch))
    assert all(torch.equal(one, other) for one, other in zip(right(step), right(stock), strict=True))


def change_rate(step):
    step.optimizer.param_groups[0]["lr"] = 0.5


def change_weights(step):
    with torch.no_grad():
        for p in step.model.parameters():
            p.mul_(0.5)


def load_weights(step):
    step.model.load_state_dict({name: value * 0.5 for name, value in step.model.state_dict().items()})


def load_state(step):
    step.optimizer.load_state_dict(copy.deepcopy(step.optimizer.state_dict()))


def save_and_load(step):
    file = io.BytesIO()
    torch.save({"model": step.model.state_dict(), "optimizer": step.optimizer.state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file)
    step.model.load_state_dict(loaded["model"])
    step.optimizer.load_state_dict(loaded["optimizer"])


def other_shape(step):
    step(*next(batches(1, size=4)))


def micro_batch(step):
    with step.no_update():
        step(*next(batches(1)))


def no_gradient(step):
    step.model[0].weight.requires_grad_(False)


def eager_step(step):
    loss_fn(step.model, *next(batches(1))).backward()
    step.optimizer.step()
    step.optimizer.zero_grad()


def set_grads(step):
    for p in step.model.parameters():
        p.grad = torch.ones_like(p)


def empty_state(step):
    step.optimizer.state.clear()


@pytest.mark.parametrize("policy", ["forward_fusion", "cross_step"])
@pytest.mark.parametrize(
    "between",
    [change_rate, change_weights, load_weights, load_state, save_and_load, other_shape, micro_batch, no_gradient,
     eager_step, set_grads, empty_state],
)  # fmt: skip
def test_what_a_loop_does_between_two_steps(between, policy, left):
    step, stock = left
    between(step)
    between(stock)
    go_on(step, stock)


@pytest.mark.parametrize("policy", ["forward_fusion", "cross_step"])
def test_batches_in_one_place(policy):
    """Work that is left reads the batch as it was."""
    costs = random_costs(layer_names(make("mlp")), 8)
    results = []
    for options in ({"policy": policy, "costs": costs}, {}):
        model = make("mlp")
        step = gradweave.compile(model, loss_fn, adamw(model.parameters()), lower="replay", **options)
        x, y = next(batches(1))
        for new_x, new_y in batches(6):
            x.copy_(new_x)
            y.copy_(new_y)
            step(x, y)
            x.zero_()
        results.append(right(step))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_a_step_that_fails_loses_nothing_of_the_one_before(left):
    step, stock = left
    x, y = next(batches(1))
    with pytest.raises((RuntimeError, IndexError)):
        step(x, torch.full_like(y, 99))
    assert all(torch.equal(one, other) for one, other in zip(right(step), right(stock), strict=True))
    go_on(step, stock)


def test_a_step_that_is_dropped_leaves_its_weights_right():
    _, stock = train(make("mlp"), STEPS)
    model = make("mlp")
    _, step = train(model, STEPS, policy="forward_fusion")
    assert type(model[0].weight) is PendingParameter
    del step
    gc.collect()
    assert type(model[0].weight) is nn.Parameter
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), stock.model.parameters(), strict=True))
    assert not model._forward_pre_hooks


def test_a_graph_from_before_the_step_cannot_be_run_backward(left):
    step, _ = left
    loss = loss_fn(step.model, *next(batches(1)))
    step(*next(batches(1)))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_weights_that_others_see_are_never_pending():
    model = make("mlp")
    shown = model[0].weight.detach().numpy()
    step = gradweave.compile(model, loss_fn, adamw(model.parameters()), lower="replay", policy="forward_fusion")
    for batch in batches(STEPS):
        step(*batch)
    assert all(type(p) is nn.Parameter for p in model.parameters())
    _, stock = train(make("mlp"), STEPS)
    assert (shown == stock.model[0].weight.detach().numpy()).all()


def test_where_dynamo_is_switched_off(left):
    step, stock = left
    with torch.compiler.set_stance("force_eager"):
        for batch in batches(2):
            assert torch.equal(step(*batch), stock(*batch))
    go_on(step, stock)


def test_models_whose_readers_notice_nothing_are_refused():
    model = nn.Sequential(torch.jit.script(nn.Linear(48, 5)))
    with pytest.raises(UnsupportedError, match="ScriptModule"):
        gradweave.compile(model, loss_fn, adamw(model.parameters()), policy="forward_fusion")
    assert not model._forward_pre_hooks


def test_a_recorded_step_does_first_what_is_left(left):
    step, stock = left
    for one in (step, stock):
        one.record(lambda *_: nullcontext())
        one(*next(batches(1)))
        one.record(None)
    go_on(step, stock)


def grown_scales(policy):
    model = make("mlp")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    step = gradweave.compile(model, loss_fn, adamw(model.parameters()), lower="replay", policy=policy, scaler=scaler)
    scales = []
    for number, batch in enumerate(batches(7)):
        step(*batch)
        scales.append(scaler.get_scale())
        if number == 4:
            scaler.update(32.0)
    return scales, right(step)


def test_a_loss_scale_is_that_of_the_step():
    scales, weights = grown_scales("forward_fusion")
    expected, stock = grown_scales("auto")
    assert scales == expected
    assert all(torch.equal(one, other) for one, other in zip(weights, stock, strict=True))


class Masked(nn.Module):
    """A weight under a mask, which the loop changes, and hidden values that a step returns."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(48, 12), nn.Linear(12, 5)
        self.register_buffer("mask", torch.ones(12, 48))

    def forward(self, x):
        hidden = torch.tanh(nn.functional.linear(x, self.one.weight * self.mask, self.one.bias))
        return self.two(hidden), hidden


def masked_loss(model, x, y):
    out, hidden = model(x)
    return nn.functional.cross_entropy(out, y), hidden


def test_masks_and_results_that_a_loop_changes_between_steps():
    results = []
    torch.manual_seed(0)
    start = Masked()
    for policy in ("cross_step", "auto"):
        model = copy.deepcopy(start)
        costs = random_costs(["one", "two"], 3) if policy == "cross_step" else None
        step = gradweave.compile(
            model, masked_loss, adamw(model.parameters()), lower="replay", policy=policy, costs=costs
        )
        for number, batch in enumerate(batches(7)):
            _, hidden = step(*batch)
            hidden.zero_()
            model.mask[number].zero_()
        results.append(right(step))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_state_that_a_loop_holds_is_never_late():
    model = make("mlp")
    step = gradweave.compile(model, loss_fn, adamw(model.parameters()), lower="replay", policy="forward_fusion")
    given = list(batches(6))
    for batch in given[:4]:
        step(*batch)
    state = step.optimizer.state[model[0].weight]
    held = state["exp_avg"]
    for batch in given[4:]:
        step(*batch)
    _, stock = train(make("mlp"), 6)
    assert torch.equal(held, stock.optimizer.state[stock.model[0].weight]["exp_avg"])
    assert type(model[0].weight) is nn.Parameter


def test_an_interrupt_while_weights_become_pending(monkeypatch):
    _, stock = train(make("mlp"), STEPS)
    _, step = train(make("mlp"), STEPS - 1, policy="forward_fusion")
    real, calls = left_work.make_pending, []

    def interrupted(*given):
        calls.append(None)
        if len(calls) == 3:
            raise KeyboardInterrupt
        real(*given)

    monkeypatch.setattr(left_work, "make_pending", interrupted)
    with pytest.raises(KeyboardInterrupt):
        step(*list(batches(STEPS))[-1])
    assert all(torch.equal(one, other) for one, other in zip(right(step), right(stock), strict=True))
    go_on(step, stock)


@pytest.mark.parametrize("how", ["in a step", "at a look"])
def test_an_error_in_the_midst_of_what_is_left_loses_none_of_it(how, left, monkeypatch):
    step, stock = left
    real, calls = lanes.map_arg, []

    def failing(*given):
        calls.append(None)
        if len(calls) == 9:
            raise torch.OutOfMemoryError("for once")
        return real(*given)

    monkeypatch.setattr(lanes, "map_arg", failing)
    with pytest.raises(torch.OutOfMemoryError):
        step(*next(batches(1))) if how == "in a step" else step.model[0].weight.sum()
    assert all(torch.equal(one, other) for one, other in zip(right(step), right(stock), strict=True))
    go_on(step, stock)


def test_threads_that_look_all_the_time():
    model, is_over = make("mlp"), threading.Event()
    step = gradweave.compile(model, loss_fn, adamw(model.parameters()), lower="replay", policy="forward_fusion")

    def look():
        while not is_over.is_set():
            for p in model.parameters():
                p.detach().sum()

    threads = [threading.Thread(target=look, daemon=True) for _ in range(2)]
    given = list(batches(60))
    for batch in given[:4]:
        step(*batch)
    for thread in threads:
        thread.start()
    for batch in given[4:]:
        step(*batch)
    is_over.set()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    _, stock = train(make("mlp"), 60)
    assert all(torch.equal(one, other) for one, other in zip(right(step), right(stock), strict=True))


def test_compiled_code_that_reads_weights_between_steps_is_compiled_no_more_than_once_again():
    model = make("mlp")
    step = gradweave.compile(model, loss_fn, adamw(model.parameters()), lower="replay", policy="forward_fusion")
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    evaluation = torch.compile(lambda x: model(x).sum(), backend=backend, fullgraph=True)
    for x, y in batches(14):
        step(x, y)
        with torch.no_grad():
            evaluation(x)
    assert len(graphs) <= 3
    _, stock = train(make("mlp"), 14)
    assert all(torch.equal(one, other) for one, other in zip(right(step), right(stock), strict=True))


def test_layers_are_frozen_and_thawed_under_costs_of_our_own(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    results = []
    for policy in ("joint", "auto"):
        model = make("mlp")
        step = gradweave.compile(model, loss_fn, adamw(model.parameters()), lower="replay", policy=policy)
        for number, batch in enumerate(batches(9)):
            model[0].requires_grad_(number not in (3, 4, 5))
            step(*batch)
        assert step.eager_reason is None
        results.append(right(step))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
