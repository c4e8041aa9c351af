"""Compiled steps by schedules: they compute what eager steps do, and run as planned."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn, optim

import gradweave
from compiler.models import adamw, batches, loss_fn, make
from compiler.planned import POLICIES, chains, events_of, layer_names, make_chain, random_costs, train
from executed_is_planned import check_executed
from gradweave.compiler.planning import best_held_back, schedule_for, schedule_for_ranks
from gradweave.errors import ArgumentError, UnsupportedError
from gradweave.schedule import Costs, Demand, Kind, LayerCost, Link, data_parallel, plan, single
from gradweave.schedule.calls import step_call

OPTIMIZERS = {
    "adamw": adamw,
    "sgd": lambda p: optim.SGD(p, lr=0.05, momentum=0.9),
    "nadam": lambda p: optim.NAdam(p, lr=0.01),
}
OPTIONS = ({}, {"max_grad_value": 0.05}, {"max_grad_norm": 0.1}, {"scaler": 4.0})
HALF = Demand(0.5, 0.5)


def options_of(chosen):
    """Options of a compiled step, with a scaler of its own."""
    if "scaler" not in chosen:
        return dict(chosen)
    return {"scaler": torch.amp.GradScaler("cpu", init_scale=chosen["scaler"])}


def assert_same_training(one, other):
    assert torch.equal(one[0], other[0])
    mine, theirs = one[1], other[1]
    for name, value in mine.model.state_dict().items():
        assert torch.equal(value, theirs.model.state_dict()[name]), name
    states = mine.optimizer.state_dict()["state"], theirs.optimizer.state_dict()["state"]
    for number, state in states[0].items():
        for key, value in state.items():
            assert not isinstance(value, torch.Tensor) or torch.equal(value, states[1][number][key]), (number, key)


@settings(max_examples=20, deadline=None)
@given(
    blocks=chains,
    policy=st.sampled_from(POLICIES),
    seed=st.integers(0, 99),
    name=st.sampled_from(sorted(OPTIMIZERS)),
    options=st.sampled_from(OPTIONS),
)
def test_a_step_by_a_schedule_is_the_eager_step_and_runs_as_planned(blocks, policy, seed, name, options):
    """Bit for bit; or it is refused, where updates are planned before all gradients are known, and these are needed."""
    model = make_chain(blocks)
    costs = random_costs(layer_names(make_chain(blocks)), seed)
    expected = train(make_chain(blocks), make_optimizer=OPTIMIZERS[name], **options_of(options))
    try:
        made = train(model, make_optimizer=OPTIMIZERS[name], policy=policy, costs=costs, **options_of(options))
    except UnsupportedError:
        if options.keys() & {"max_grad_norm", "scaler"} and policy not in ("in_order", "forward_fusion"):
            return
        raise
    assert_same_training(made, expected)
    step = made[1]
    assert step.schedule.policy == policy
    check_executed(step.schedule, events_of(step, batches(9)))


@pytest.mark.parametrize("policy", ["backward_fusion", "side_region", "cross_step"])
@pytest.mark.parametrize("name", ["convolutional", "gpt", "tied", "checkpointed dropout"])
def test_models_that_are_no_chains(name, policy):
    names = layer_names(make(name))
    losses, step = train(make(name), policy=policy, costs=random_costs(names, 1))
    expected, stock = train(make(name))
    assert_same_training((losses, step), (expected, stock))
    check_executed(step.schedule, events_of(step, batches(9)))


@pytest.mark.parametrize("policy", ["side_region", "cross_step"])
def test_regions_that_inductor_compiles(policy):
    names = layer_names(make("small"))
    costs = Costs(tuple(LayerCost(n, 1, 1, 1, 0.5, 1, 1, 1, "", HALF, HALF, HALF, HALF) for n in names))
    losses, step = train(make("small"), policy=policy, costs=costs, lower="inductor")
    expected, stock = train(make("small"))
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    for one, other in zip(step.model.parameters(), stock.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    timeline = step.timeline(*next(batches(1)))
    assert {lane for lane, *_ in timeline.spans} == {lane.name for lane in step.schedule.lanes}
    covered = sum(len(region.slots) for region in regions_of(step))
    assert covered == 4 * len(names)


def regions_of(step):
    (program,) = step._captured.open().programs
    (variant,) = [one for one in program._variants if one.runnable.schedule is not None]
    return variant.runnable._runner.step.regions


def test_backward_fusion_frees_gradients_and_side_stream_holds_them():
    """The policy decides, not the compiler: the order of the runs is that of the plan."""
    orders = {}
    for policy in ("backward_fusion", "in_order"):
        _, step = train(make_chain(("linear",)), policy=policy)
        spans = step.timeline(*next(batches(1))).spans
        orders[policy] = "".join(span.task.kind for span in spans)
    assert orders == {"backward_fusion": "FFFWXUWXUWXU", "in_order": "FFFWXWXWXUUU"}


def test_a_schedule_of_ones_own():
    names = layer_names(make("mlp"))
    schedule = plan(single(random_costs(names, 3), steps=2), policy="joint", byte_budget=None)
    losses, step = train(make("mlp"), policy=schedule)
    assert step.schedule is schedule
    assert torch.equal(losses, train(make("mlp"))[0])
    other = plan(single(Costs.uniform(2)), policy="joint")
    with pytest.raises(UnsupportedError, match="other layers"):
        train(make("mlp"), policy=other)


def test_costs_are_measured_where_a_policy_needs_them_and_kept(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    losses, step = train(make("mlp"), policy="joint", steps=4)
    assert [layer.name for layer in step.schedule.graph.costs.layers] == ["0", "2", "3"]
    assert step.schedule.graph.costs.source == "measured"
    assert len(list(tmp_path.rglob("*.key.json"))) == 1
    assert torch.equal(losses, train(make("mlp"), steps=4)[0])


def test_a_step_is_measured_and_drawn_with_its_plan(tmp_path):
    _, step = train(make("mlp"), policy="side_stream")
    timeline = step.timeline(*next(batches(1)))
    assert "by policy 'side_stream' on gpu0 main, gpu0 side" in step.explain()
    for name in ("made.png", "made.json"):
        timeline.save(tmp_path / name, planned=step.schedule.simulate())
        assert (tmp_path / name).stat().st_size > 1000


def test_a_measured_step_is_a_step_of_the_training():
    model, other = make("dropout"), make("dropout")
    _, step = train(model, policy="forward_fusion")
    _, stock = train(other, policy="forward_fusion")
    torch.manual_seed(3)
    batch = next(batches(1))
    step.timeline(*batch)
    torch.manual_seed(3)
    stock(*batch)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_what_was_not_planned_is_not_measured():
    _, step = train(make("small"))
    assert step.schedule is None
    with pytest.raises(gradweave.GradweaveError, match="give policy="):
        step.timeline(*next(batches(1)))
    model = make("small")
    step = gradweave.compile(model, loss_fn, adamw(model.parameters()), lower="replay", policy="in_order")
    with pytest.raises(gradweave.GradweaveError, match="two steps"):
        step.timeline(*next(batches(1)))


def test_micro_batches_add_up_in_stock_order_and_the_last_one_runs_as_planned():
    results = []
    for policy in ("forward_fusion", "auto"):
        model = make("mlp")
        step = gradweave.compile(model, loss_fn, adamw(model.parameters()), lower="replay", policy=policy)
        given = list(batches(12))
        for number, batch in enumerate(given):
            if number % 3 < 2:
                with step.no_update():
                    step(*batch)
            else:
                step(*batch)
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_options_that_do_not_go_together():
    model = nn.Linear(48, 5)

    def refused(match, error=ArgumentError, **options):
        with pytest.raises(error, match=match):
            gradweave.compile(model, loss_fn, adamw(model.parameters()), **options)

    refused("forward_fusion", policy="sideways")
    refused("for one device", policy=plan(data_parallel(Costs.uniform(2), replicas=2, link=Link(1.0)), policy="ddp"))
    refused("name it", costs=Costs.uniform(1), lower="replay")


def test_shared_memory_is_refused_by_name():
    model = make("mlp")
    model[3].weight.data = model[0].weight.data[:5, :24]
    step = gradweave.compile(model, loss_fn, adamw(model.parameters()), lower="replay", policy="backward_fusion")
    given = batches(3)
    step(*next(given))
    with pytest.raises(UnsupportedError, match="share memory"):
        step(*next(given))


def test_costs_decide():
    names, gpu = ["a", "b", "c"], torch.device("cuda")
    free = Costs(tuple(LayerCost(n, 1, 1, 1, 1, 1, 1, 1, "", HALF, HALF, HALF, HALF) for n in names), name="free")
    chosen = schedule_for("auto", free, names, gpu)
    assert chosen.policy == "side_region"
    assert chosen.options["first"] in (1, 2)
    assert schedule_for("auto", free, names, torch.device("cpu")) is None
    assert schedule_for("auto", Costs.uniform(2), ["layer0", "layer1"], gpu) is None
    assert schedule_for("in_order", None, names, gpu).graph.costs.layers[0].name == "a"
    with pytest.raises(UnsupportedError, match="other layers"):
        schedule_for("auto", free, ["a", "b"], gpu)
    with pytest.raises(ArgumentError, match="measure_costs"):
        schedule_for("joint", None, names, gpu)


def messages_of(schedule):
    tasks = schedule.graph.tasks
    sent = [tasks[index] for index in schedule.graph.communication["link"] if tasks[index].step == 0]
    return [list(range(task.layer, task.layer + task.layers)) for task in sent]


def test_the_schedule_of_ranks_has_the_messages_that_they_send():
    names = ["a", "b", "c", "d"]
    schedule = schedule_for_ranks("no_barrier", names, [[3], [2, 1], [0]], 0, 2)
    assert messages_of(schedule) == [[3], [1, 2], [0]]
    call = step_call(schedule)
    ran = " ".join(f"{'~' * slot.carried}{slot.task.kind}{slot.task.layer}" for slot in call.slots)
    assert ran.startswith("~U0 F0 ~U1 ~U2 F1 F2 ~U3 F3 ")
    assert not any(slot.carried and slot.task.kind is Kind.C for slot in call.slots)


def test_what_is_held_back_is_sent_in_the_order_of_the_next_forward():
    names = ["a", "b", "c", "d"]
    schedule = schedule_for_ranks("reverse_first_k", names, [[3, 2], [0], [1]], 2, 2)
    assert schedule.options == {"k": 2}
    assert sorted(messages_of(schedule)) == [[0], [1], [2, 3]]
    order = [slot.task for slot in step_call(schedule).slots if slot.task.kind in (Kind.W, Kind.C)]
    assert " ".join(f"{task.kind}{task.layer}" for task in order) == "W3 W2 C2 W0 C0 W1 C1"


@pytest.mark.parametrize("messages", [[[3, 1], [2], [0]], [[3], [2, 1]], [[3], [3, 2, 1], [0]]])
def test_messages_of_layers_that_are_no_neighbours_are_refused(messages):
    with pytest.raises(UnsupportedError, match="not used one after the other"):
        schedule_for_ranks("no_barrier", ["a", "b", "c", "d"], messages, 0, 2)


def test_how_much_is_held_back_depends_on_the_link():
    layers = tuple(LayerCost(f"{i}", 1.0, 1.0, 1.0, 0.1, 1 << 23, 1 << 23, 1 << 23) for i in range(8))
    costs = Costs(layers)
    assert best_held_back(costs, Link(1e15), 2) == 0
    assert best_held_back(costs, Link((1 << 23) / 2.5), 2) > 0


def test_each_place_has_its_policies():
    model = nn.Linear(48, 5)
    for policy in ("ddp", "no_barrier", "reverse_first_k"):
        with pytest.raises(ArgumentError, match="on one device use"):
            gradweave.compile(model, loss_fn, adamw(model.parameters()), policy=policy)
