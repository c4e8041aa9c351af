"""Pipelines in real processes, against training without one.

A function above a test runs on every rank, and returns what its test looks at.
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW

from gradweave.fusion import fuse
from gradweave.parallel.pipeline import Pipeline, measure_layers
from gradweave.schedule import Costs, LayerCost
from parallel.pipeline.models import batch, loss_fn, make, stock_step
from parallel.pipeline.training import gradients, raised

EXACT = [
    ("fast_forward", {}),
    ("modulo", {"group": 1}),
    ("modulo", {"group": 2}),
    ("gpipe", {}),
    ("one_f_one_b", {}),
    ("interleaved", {"group": 2}),
    ("interleaved_zero_bubble", {"group": 2}),
    ("zbv", {}),
]


@pytest.mark.parametrize(("policy", "options"), EXACT)
@pytest.mark.parametrize("split", ["fast", "torch"])
def test_every_schedule_gives_the_gradients_of_the_whole_model_bit_for_bit(two, policy, options, split):
    for rank, found in two.run(gradients, name="gpt", policy=policy, split=split, **options).items():
        assert found["worst"] == 0, (rank, found)
        assert found["policy"] == policy


@pytest.mark.parametrize("policy", ["fast_forward", "modulo", "gpipe"])
@pytest.mark.parametrize("name", ["mlp", "convolutions", "pairs", "recomputed"])
def test_norms_frozen_layers_convolutions_tuples_and_recomputed_activations(two, policy, name):
    """The trial run by which torch finds out shapes leaves no trace in the statistics of norms."""
    for rank, found in two.run(gradients, name=name, policy=policy).items():
        assert found["worst"] == 0, (rank, found)


@pytest.mark.parametrize("policy", ["modulo", "fast_forward", "interleaved_zero_bubble"])
def test_tied_embeddings(two, policy):
    """Their gradient is a sum over ranks, in another order than that of the whole model."""
    for found in two.run(gradients, name="tied", policy=policy).values():
        assert found["worst"] < 1e-6


def accumulation(microbatches=2):
    """Take two steps whose gradients add up, each with half of the loss; compare them with those of the whole model."""
    pipe = Pipeline(make("tied"), loss_fn, microbatches=microbatches, policy="modulo", group=1, timeout=20)
    stock = make("tied")
    for step in range(2):
        stock_step(stock, "tied", microbatches, seed=step, factor=0.5)
        pipe.step(*batch("tied", seed=step), loss_factor=0.5)
    grads = {n: p.grad for n, p in stock.named_parameters(remove_duplicate=False)}
    for n, p in pipe.module.named_parameters(remove_duplicate=False):
        torch.testing.assert_close(p.grad, grads[n], rtol=1e-5, atol=1e-7, msg=n)
    pipe.close()


def test_gradients_of_several_steps_add_up(two):
    two.run(accumulation)


def test_names_are_those_of_the_whole_model(two):
    found = two.run(gradients, name="gpt", policy="fast_forward")
    assert "0.tokens.weight" in found[0]["names"]
    assert "7.out.weight" in found[1]["names"]
    assert set(found[0]["names"]).isdisjoint(found[1]["names"])


def training(name, policy, fused=False, clip=None, steps=3, **options):
    """Train; return the largest difference of a weight or norm from training without a pipeline, and bytes held."""
    pipe = Pipeline(make(name), loss_fn, microbatches=4, policy=policy, timeout=20, **options)
    stock = make(name)
    ours, theirs = AdamW(pipe.module.parameters(), lr=0.01), AdamW(stock.parameters(), lr=0.01)
    fusion = fuse(pipe.module, ours, mode="forward") if fused else None
    worst = 0.0
    for step in range(steps):
        stock_step(stock, name, 4, seed=step)
        pipe.step(*batch(name, seed=step))
        if clip is not None:
            wanted, found = clip_grad_norm_(stock.parameters(), clip), pipe.clip_grad_norm_(clip)
            worst = max(worst, float((wanted - found).abs()))
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    held = pipe.most_bytes_held
    if fusion is not None:
        fusion.detach()
    weights = stock.state_dict()
    for n, value in pipe.state_dict().items():
        worst = max(worst, float((value - weights[n]).abs().max()))
    pipe.close()
    return {"worst": worst, "held": held}


def test_weights_after_training_with_clipping(two):
    for found in two.run(training, name="gpt", policy="modulo", clip=0.1).values():
        assert found["worst"] == 0


def test_clipping_counts_tied_weights_once(two):
    for found in two.run(training, name="tied", policy="modulo", clip=0.1, steps=1).values():
        assert found["worst"] < 1e-5


def test_updates_fused_into_the_next_forward(two):
    plain = two.run(training, name="gpt", policy="fast_forward")
    fused = two.run(training, name="gpt", policy="fast_forward", fused=True, clip=0.1)
    for rank in plain:
        assert plain[rank]["worst"] == fused[rank]["worst"] == 0
        assert plain[rank]["held"] == fused[rank]["held"] > 0


def fused_in_backward():
    """Return what a step raises whose updates are fused into backward."""
    pipe = Pipeline(make("gpt"), loss_fn, microbatches=4, policy="fast_forward", timeout=20)
    with fuse(pipe.module, SGD(pipe.module.parameters(), lr=0.1), mode="backward"):
        return raised(lambda: pipe.step(*batch("gpt")))


def test_updates_fused_into_backward_are_refused(two):
    for message in two.run(fused_in_backward).values():
        assert 'mode="forward"' in message


def checkpoints(folder):
    """Save a state whole and by DCP; load both into other pipelines and the model; return what an empty one raises."""
    pipe = Pipeline(make("gpt"), loss_fn, microbatches=2, policy="modulo", group=1, timeout=20)
    pipe.step(*batch("gpt"))
    whole = pipe.gather_state_dict()
    plain = make("gpt", seed=5)
    if pipe.has_first_stage:
        assert list(whole) == list(plain.state_dict())
        torch.save(whole, f"{folder}/whole.pt")
        plain.load_state_dict(whole)
    else:
        assert whole is None
    checkpoint.save({"model": pipe.state_dict()}, checkpoint_id=f"{folder}/dcp")
    dist.barrier()
    other = Pipeline(make("gpt", seed=7), loss_fn, microbatches=2, policy="fast_forward", timeout=20)
    other.load_state_dict(torch.load(f"{folder}/whole.pt"))
    wanted = make("gpt").state_dict()
    for n, value in other.state_dict().items():
        assert torch.equal(value, wanted[n]), n
    third = Pipeline(make("gpt", seed=8), loss_fn, microbatches=2, policy="gpipe", timeout=20)
    state = {"model": third.state_dict()}
    checkpoint.load(state, checkpoint_id=f"{folder}/dcp")
    third.load_state_dict(state["model"])
    for n, value in third.state_dict().items():
        assert torch.equal(value, wanted[n]), n
    message = raised(lambda: other.load_state_dict({}))
    for one in (pipe, other, third):
        one.close()
    return message


def test_checkpoints_are_those_of_the_whole_model(two, tmp_path):
    for message in two.run(checkpoints, folder=str(tmp_path)).values():
        assert "state='0 entries': lacks " in message


def optimizer_state(folder):
    """Train on with an optimizer's state in a pipeline that is cut otherwise; return the weights of both pipelines.

    The state has global names, and goes through torch's own helpers.
    """

    def make_one(seed, **options):
        pipe = Pipeline(make("gpt", seed=seed), loss_fn, microbatches=2, timeout=20, **options)
        return pipe, AdamW(pipe.module.parameters(), lr=0.01)

    def train(pipe, optimizer, seeds):
        for seed in seeds:
            pipe.step(*batch("gpt", seed=seed))
            optimizer.step()
            optimizer.zero_grad()

    first, one = make_one(0, policy="modulo", group=1)
    train(first, one, range(2))
    state = {"model": first.state_dict(), "optimizer": get_optimizer_state_dict(first.module, one)["state"]}
    checkpoint.save(state, checkpoint_id=f"{folder}/both")
    dist.barrier()
    train(first, one, range(2, 4))

    second, two = make_one(3, policy="fast_forward")
    empty = get_optimizer_state_dict(second.module, two)
    state = {"model": second.state_dict(), "optimizer": empty["state"]}
    checkpoint.load(state, checkpoint_id=f"{folder}/both")
    second.load_state_dict(state["model"])
    set_optimizer_state_dict(second.module, two, {**empty, "state": state["optimizer"]})
    train(second, two, range(2, 4))
    result = first.gather_state_dict(), second.gather_state_dict()
    first.close()
    second.close()
    return result


def test_optimizer_state_moves_to_a_pipeline_that_is_cut_otherwise(two, tmp_path):
    first, second = two.run(optimizer_state, folder=str(tmp_path))[0]
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def autocast(policy):
    """Return the largest difference of a gradient from training without a pipeline, under autocast in bfloat16."""
    pipe = Pipeline(make("gpt"), loss_fn, microbatches=4, policy=policy, timeout=20)
    stock = make("gpt")
    x, target = batch("gpt")
    for x_part, target_part in zip(x.chunk(4), target.chunk(4), strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_fn(stock(x_part), target_part)
        (loss / 4).backward()
    with torch.autocast("cpu", torch.bfloat16):
        pipe.step(x, target)
    grads = {n: p.grad for n, p in stock.named_parameters()}
    worst = max(float((p.grad - grads[n]).abs().max()) for n, p in pipe.module.named_parameters())
    pipe.close()
    return worst


@pytest.mark.parametrize("policy", ["fast_forward", "gpipe"])
def test_autocast_is_for_forwards_only(two, policy):
    assert set(two.run(autocast, policy=policy).values()) == {0.0}


def hooks():
    """Return whether hooks on a gradient are called for each micro-batch; compare the gradients that they change."""
    pipe = Pipeline(make("gpt"), loss_fn, microbatches=2, policy="fast_forward", timeout=20)
    stock = make("gpt")
    heard = []
    for model in (pipe.module, stock):
        for n, p in model.named_parameters():
            if n.endswith("up.weight"):
                p.register_hook(lambda grad: 2 * grad)
                p.register_post_accumulate_grad_hook(lambda p: heard.append(p))
    stock_step(stock, "gpt", 2)
    before = len(heard)
    pipe.step(*batch("gpt"))
    grads = {n: p.grad for n, p in stock.named_parameters()}
    for n, p in pipe.module.named_parameters():
        assert torch.equal(p.grad, grads[n]), n
    own = sum(n.endswith("up.weight") for n, _ in pipe.module.named_parameters())
    pipe.close()
    return len(heard) - before == 2 * own


def test_hooks_on_gradients(two):
    assert all(two.run(hooks).values())


@pytest.mark.parametrize("cap", [1, 2])
def test_a_cap_on_micro_batches_in_flight(two, cap):
    for found in two.run(gradients, name="gpt", policy="modulo", group=1, max_in_flight=cap).values():
        assert found["worst"] == 0
        assert max(found["in_flight"]) <= cap


def uneven(**bytes_of):
    heavy = {0: 5.0}
    return Costs(tuple(LayerCost(f"{i}", *([heavy.get(i, 1.0)] * 3), **bytes_of) for i in range(8)))


def planned(costs, **options):
    """Take a step with a plan that is made from the first rank's costs; return what is known of the plan."""
    given = costs if dist.get_rank() == 0 else None
    pipe = Pipeline(make("gpt"), loss_fn, microbatches=4, costs=given, timeout=20, **options)
    loss = pipe.step(*batch("gpt"))
    plan = pipe.plan
    pipe.close()
    return {
        "policy": plan.program.policy,
        "layers": [len(run) for run in plan.runs],
        "cap": plan.program.max_in_flight,
        "peak": plan.peak_bytes,
        "loss": loss,
        "held": pipe.most_bytes_held,
    }


def test_uneven_layers_are_balanced_by_their_costs(two):
    for found in two.run(planned, costs=uneven(), policy="fast_forward").values():
        assert found["layers"] == [2, 6]


def test_auto_takes_what_is_predicted_to_be_fastest(two):
    found = two.run(planned, costs=uneven(), policy="auto")
    assert found[0]["layers"] == found[1]["layers"]
    assert found[0]["policy"] == found[1]["policy"]
    assert found[0]["loss"] is None or found[1]["loss"] is None


def test_a_byte_budget_bounds_what_is_predicted_and_what_waits(two):
    costs = uneven(input_bytes=1000, output_bytes=1000)
    free = two.run(planned, costs=costs, policy="modulo", group=1)
    tight = two.run(planned, costs=costs, policy="modulo", group=1, byte_budget=10000)
    for rank in free:
        assert tight[rank]["peak"] <= 10000 < free[rank]["peak"]
        assert tight[rank]["held"] <= free[rank]["held"]


def test_weight_gradients_that_wait_are_computed_early_when_they_hold_too_much(two):
    for found in two.run(gradients, name="gpt", policy="modulo", group=1, costs=uneven(), byte_budget=1).values():
        assert found["worst"] == 0
        assert found["held"] == 0


def in_groups():
    """Train two pipelines of two ranks each, side by side; return the largest difference of a gradient."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[dist.get_rank() // 2]
    return gradients("gpt", policy="modulo", group=2, process_group=mine)["worst"]


def test_a_pipeline_on_a_group_of_some_ranks(fresh):
    assert set(fresh(4).run(in_groups).values()) == {0.0}


def measured():
    """Return the plan that is chosen from costs that the first rank has measured."""
    model = make("gpt")
    x, target = batch("gpt")
    costs = measure_layers(model, loss_fn, (x[:2], target[:2])) if dist.get_rank() == 0 else None
    pipe = Pipeline(model, loss_fn, microbatches=4, policy="auto", costs=costs, timeout=20)
    pipe.step(x, target)
    pipe.close()
    return pipe.plan.program.policy, [len(run) for run in pipe.plan.runs], pipe.plan.seconds


def test_costs_and_link_are_measured_by_the_first_rank_and_all_follow(two):
    found = two.run(measured)
    assert found[0] == found[1]
    assert found[0][2] > 0
