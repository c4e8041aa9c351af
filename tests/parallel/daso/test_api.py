"""The loop as users write it, on two nodes of two ranks."""

import pytest
import torch

from gradweave.parallel.daso import DASO
from parallel.daso.training import loss_of, make_model, make_optimizer, weights_of
from reference.daso_simulation import make_nodes, simulate_delta, simulate_paper


def same_everywhere(results, key="end"):
    first = results[0][key] if key is not None else results[0]
    return all(torch.equal(first, result[key] if key is not None else result) for result in results.values())


@pytest.mark.parametrize("payload", ["bfloat16", "float32"])
@pytest.mark.parametrize(("every", "wait"), [(1, 0), (1, 1), (3, 2), (4, 4), (5, 0)])
def test_every_step_is_the_simulation_bit_for_bit(two_by_two, payload, every, wait):
    steps = 11
    found = two_by_two.run("train", steps=steps, every=every, wait=wait, payload=payload, finish=False)
    expected = simulate_delta(
        make_nodes(2, 2, make_model, make_optimizer), loss_of,
        steps=steps, every=every, wait=wait, payload=getattr(torch, payload),
    )  # fmt: skip
    for rank, result in found.items():
        for step in range(steps):
            assert torch.equal(result["seen"][step], expected[step][rank // 2]), (rank, step)


@pytest.mark.parametrize("payload", ["bfloat16", "float32"])
def test_the_published_rules_are_the_simulation_bit_for_bit(two_by_two, payload):
    losses = [1.0, 1.0, *[0.9] * 6, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9]
    common = {"epochs": len(losses), "epoch_steps": 6, "losses": losses, "warm_up": 1, "cool_down": 1}
    found = two_by_two.run("train_paper", **common, payload=payload, total=len(losses))
    expected, rhythm = simulate_paper(
        make_nodes(2, 2, make_model, make_optimizer), loss_of, **common, payload=getattr(torch, payload)
    )
    assert {(4, 1), (2, 1), (1, 1), (8, 2)} <= set(rhythm)
    for rank, result in found.items():
        assert result["rhythm"] == rhythm
        assert all(torch.equal(x, y[rank // 2]) for x, y in zip(result["seen"], expected, strict=True))


def test_without_waiting_it_is_data_parallel_for_sgd(two_by_two):
    stock = two_by_two.run("train_ddp", steps=12)[0]["seen"]
    for result in two_by_two.run("train", steps=12, every=1, wait=0, payload="float32").values():
        assert torch.allclose(result["seen"], stock, rtol=1e-6, atol=1e-7)


def test_the_warm_up_is_data_parallel_for_any_optimizer(two_by_two):
    stock = two_by_two.run("train_ddp", steps=8, optimizer="adamw", lr=0.01)[0]["seen"]
    found = two_by_two.run("train", steps=12, warm_up=8, every=2, wait=1, optimizer="adamw", lr=0.01)
    for result in found.values():
        assert torch.allclose(result["seen"][:8], stock, rtol=1e-5, atol=1e-6)
    assert not torch.equal(found[0]["seen"][9], found[2]["seen"][9])
    assert same_everywhere(found)


def test_in_the_cool_down_all_ranks_are_the_same_again(two_by_two):
    found = two_by_two.run("train", steps=12, every=3, wait=2, total=12, cool_down=4)
    assert not torch.equal(found[0]["seen"][6], found[2]["seen"][6])
    for step in range(8, 12):
        assert all(torch.equal(found[0]["seen"][step], found[rank]["seen"][step]) for rank in found)


@pytest.mark.parametrize(
    "options",
    [
        {"every": 3, "wait": 2},
        {},
        {"pace": "lr", "schedule": True},
        {"pace": "plateau"},
        {"every": 2, "wait": 1, "payload": "float16"},
        {"every": 1000, "wait": 1000},
        {"warm_up": 3, "cool_down": 3, "total": 15, "every": 4, "wait": 4},
        {"optimizer": "adamw", "lr": 0.01, "every": 3, "wait": 1},
        {"kind": "norm", "every": 2, "wait": 2},
    ],
)
def test_afterwards_all_ranks_have_the_same_weights(two_by_two, options):
    found = two_by_two.run("train", steps=15, **options)
    assert same_everywhere(found)
    assert torch.isfinite(found[0]["end"]).all()
    assert len({tuple(result["rhythm"]) for result in found.values()}) == 1


def test_running_statistics_are_averaged_and_momentum_too(two_by_two):
    found = two_by_two.run("train", steps=9, kind="norm", every=2, wait=1)
    for rank in found:
        assert all(torch.equal(a, b) for a, b in zip(found[0]["buffers"][:2], found[rank]["buffers"][:2], strict=True))
        assert (found[rank]["buffers"][1] > 0).all()
        assert all(torch.equal(a, b) for a, b in zip(found[0]["state"], found[rank]["state"], strict=True))


def test_weights_are_never_rounded_to_16_bits(two_by_two):
    for result in two_by_two.run("train", steps=6, every=2, wait=1).values():
        assert not torch.equal(result["end"], result["end"].bfloat16().float())


def test_same_seed_same_weights_run_by_run(two_by_two):
    runs = [two_by_two.run("train", steps=10, every=2, wait=2) for _ in range(2)]
    assert all(torch.equal(runs[0][rank]["end"], runs[1][rank]["end"]) for rank in runs[0])


def test_a_recorded_rhythm_is_replayed_bit_for_bit(two_by_two):
    first = two_by_two.run("train", steps=30)
    again = two_by_two.run("train", steps=30, rhythm=first[0]["rhythm"])
    assert all(torch.equal(first[rank]["seen"], again[rank]["seen"]) for rank in first)


@pytest.mark.parametrize(
    ("mode", "every", "wait", "share"),
    [("delta", 4, 1, 1.0), ("delta", 1, 1, 1.0), ("delta", 4, 4, 1.0), ("paper", 4, 1, 0.875)],
)
def test_progress_while_an_exchange_is_under_way(two_by_two, mode, every, wait, share):
    """The published merge keeps 2S/(2S+P) of what is done meanwhile; ours keeps all of it."""
    for seen in two_by_two.run("progress", mode=mode, every=every, wait=wait, steps=41).values():
        assert (seen[40] - seen[8]) / 32 == pytest.approx(share, abs=1e-6)


def test_with_data_parallel_inside_the_node(two_by_two):
    own = two_by_two.run("train", steps=10, every=3, wait=1, payload="float32")
    found = two_by_two.run("inner_ddp", steps=10, every=3, wait=1, payload="float32")
    assert same_everywhere(found)
    for rank in found:
        assert torch.allclose(found[rank]["seen"], own[rank]["seen"], rtol=1e-5, atol=1e-6)
    together = two_by_two.run("inner_ddp", steps=6, warm_up=6, payload="float32")
    stock = two_by_two.run("train_ddp", steps=6)[0]["seen"]
    assert torch.allclose(together[0]["seen"], stock, rtol=1e-5, atol=1e-6)


def test_gradients_are_averaged_before_backward_returns(two_by_two):
    found = two_by_two.run("sees_averages")
    for node in range(2):
        own = [found[2 * node + place][0] for place in range(2)]
        for place in range(2):
            assert torch.equal(found[2 * node + place][1], (own[0] + own[1]) / 2)


def test_accumulation_counts_steps_declared_or_not(two_by_two):
    declared = two_by_two.run("accumulation", declared=True)
    silent = two_by_two.run("accumulation", declared=False)
    for found in (declared, silent):
        assert same_everywhere(found, 0)
        assert {steps for _, steps, _ in found.values()} == {6}
    assert torch.allclose(declared[0][0], silent[0][0], rtol=1e-5, atol=1e-6)
    assert declared[0][2] == pytest.approx(float(declared[1][2]))


def test_steps_left_out_by_gradient_scaling_keep_everybody_in_step(two_by_two):
    found = two_by_two.run("scaled", steps=9, broken=[2, 3, 8])
    assert same_everywhere(found, 0)
    assert [found[rank][1] for rank in range(4)] == [0, 0, 3, 3]
    assert [found[rank][3] for rank in range(4)] == [8.0, 8.0, 1.0, 1.0]
    assert {found[rank][2] for rank in (0, 1)} == {9}
    assert {found[rank][2] for rank in (2, 3)} == {8}, "the last one, left out, ends with finish()"


def test_nodes_agree_on_a_scale_before_they_average_scaled_gradients(two_by_two):
    found = two_by_two.run("scaled", steps=9, broken=[2, 3], agreed=True, total=9, cool_down=4)
    assert len({found[rank][3] for rank in found}) == 1
    assert same_everywhere(found, 4), "in the cool-down all nodes take the same steps"


def test_parameters_that_were_not_there_at_the_start(two_by_two):
    assert same_everywhere(two_by_two.run("new_parameters"), None)


def test_a_step_left_out_before_some_ranks_run_out(two_by_two):
    assert same_everywhere(two_by_two.run("uneven_skip"), None)


@pytest.mark.parametrize("how", ["no_sync", "grad", "in place"])
def test_gradients_without_a_backward_are_averaged_when_the_step_begins(two_by_two, how):
    found = two_by_two.run("without_backward", how=how)
    plain = two_by_two.run("train", steps=6, every=2, wait=1)
    assert {counted for _, counted in found.values()} == {6}
    assert all(torch.equal(found[rank][0], plain[rank]["end"]) for rank in found)


def test_several_backwards_with_a_graph_that_is_kept(two_by_two):
    assert same_everywhere(two_by_two.run("several_backwards"), None)


def test_groups_of_the_users_own(two_by_two):
    assert same_everywhere(two_by_two.run("partial_group"), None)
    assert same_everywhere(two_by_two.run("partial_group"), None)


def test_ranks_may_use_different_parts(two_by_two):
    found = two_by_two.run("conditional", steps=7)
    for gradients, _ in found.values():
        assert gradients == [False, False, False, False, True, True]
    assert same_everywhere(found, 1)


def test_odd_parameters(two_by_two):
    found = two_by_two.run("odd_parameters", steps=8)
    for node in range(2):
        assert torch.equal(found[2 * node][2], found[2 * node + 1][2]), "averaged from the first backward on"
    for params, (frozen, unused, late), _ in found.values():
        assert frozen
        assert unused
        assert not late
        assert all(torch.equal(value, found[0][0][name]) for name, value in params.items())


def test_closures(two_by_two):
    found = two_by_two.run("closure", steps=6)
    plain = two_by_two.run("train", steps=6, every=2, wait=1)
    assert all(torch.equal(found[rank][0], plain[rank]["end"]) for rank in found)
    assert {steps for _, steps in found.values()} == {6}


@pytest.mark.parametrize("first", [True, False])
def test_a_compiled_model(two_by_two, first):
    found = two_by_two.run("compiled", steps=6, first=first)
    plain = two_by_two.run("train", steps=6, every=2, wait=1)
    assert all(torch.allclose(found[rank][0], plain[rank]["end"], rtol=1e-5, atol=1e-6) for rank in found)


@pytest.mark.parametrize("first", [True, False])
def test_a_reordered_model(two_by_two, first):
    found = two_by_two.run("reordered", steps=6, first=first)
    plain = two_by_two.run("train", steps=6, every=2, wait=1)
    assert all(torch.equal(found[rank], plain[rank]["end"]) for rank in found)


def test_reentrant_checkpointing(two_by_two):
    found = two_by_two.run("reentrant", steps=6)
    plain = two_by_two.run("train", steps=6, every=2, wait=1, payload="float32")
    assert {steps for _, steps in found.values()} == {6}
    assert all(torch.allclose(found[rank][0], plain[rank]["end"], rtol=1e-5, atol=1e-6) for rank in found)


def test_real_digits_are_learnt_as_well_as_by_data_parallel(two_by_two):
    stock = two_by_two.run("learn_digits", way="ddp")[0]
    assert stock > 0.9
    for way in ("delta", "paper"):
        found = two_by_two.run("learn_digits", way=way)
        assert found[0] > stock - 0.02
        assert abs(found[0] - found[3]) < 0.02


def test_one_process_trains_as_without(caplog):
    weights = []
    for attached in (False, True):
        model = make_model()
        opt = make_optimizer(model.parameters())
        daso = DASO(model, opt) if attached else None
        for step in range(5):
            loss_of(model, 0, step).backward()
            opt.step()
            opt.zero_grad()
        if daso is not None:
            assert daso.steps == 5
            assert daso.stats()["exchanges"] == 0
            daso.load_state_dict(daso.state_dict())
            daso.finish()
            daso.finish()
        weights.append(weights_of(model))
    assert torch.equal(*weights)


def test_letting_go_leaves_nothing_behind():
    model = make_model()
    opt = make_optimizer(model.parameters())
    with pytest.raises(ZeroDivisionError), DASO(model, opt) as daso:
        raise ZeroDivisionError
    loss_of(model, 0, 0).backward()
    opt.step()
    assert daso.steps == 0
    DASO(model, opt).detach()
