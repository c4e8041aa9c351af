import pytest
import torch

POLICIES = [
    {"policy": "in_order"}, {"policy": "no_barrier"}, {"policy": "reverse_first_k", "k": 2},
    {"policy": "reverse_first_k", "k": "all"}, {"policy": "reverse_first_k"}, {"policy": "auto"},
]  # fmt: skip


def same(one, other):
    for key in ("seen", "losses", "norms", "state"):
        assert len(one[key]) == len(other[key])
        for a, b in zip(one[key], other[key], strict=True):
            assert torch.equal(torch.as_tensor(a), torch.as_tensor(b)), key
    assert torch.equal(one["end"], other["end"])


@pytest.mark.parametrize("options", POLICIES, ids=lambda o: " ".join(map(str, o.values())))
@pytest.mark.parametrize("kind", ["mlp", "conv", "gpt", "tied"])
def test_results_are_those_of_ddp_bit_for_bit(two, kind, options):
    options = {**options, "bucket_bytes": 700}
    ours = two.run("train", kind=kind, optimizer="adamw", steps=8, **options)
    ddp = two.run("train", kind=kind, optimizer="adamw", steps=8, way="ddp")
    for rank in range(2):
        same(ours[rank], ddp[rank])
        assert ours[rank]["names"] == [name.removeprefix("module.") for name in ddp[rank]["names"]]
        assert all(torch.equal(a, b) for a, b in zip(ours[rank]["buffers"], ddp[rank]["buffers"], strict=True))
    assert torch.equal(ours[0]["end"], ours[1]["end"])


KINDS_OF_LOOPS = [
    "keeps_gradients", "replaces_gradient_data", "adds_without_sync", "reads_behind_step", "never_clears",
    "adds_a_layer", "two_heads", "reads_gradients", "evaluates", "two_backwards", "two_forwards_first",
    "clears_in_place", "thaws", "throws_away", "scales",
]  # fmt: skip
BY_HAND = ("two_forwards_first", "thaws", "adds_a_layer", "two_heads", "adds_without_sync")
HELD = {"policy": "reverse_first_k", "k": 3, "bucket_bytes": 700}


@pytest.mark.parametrize("options", [{"policy": "in_order"}, {"policy": "no_barrier"}, HELD], ids=lambda o: o["policy"])
@pytest.mark.parametrize("body", KINDS_OF_LOOPS)
def test_loops_of_all_kinds_give_what_ddp_gives(two, body, options):
    ours = two.run("loop", way="ours", body=body, **options)
    ddp = two.run("loop", way="by hand" if body in BY_HAND else "ddp", body=body)
    for rank in range(2):
        assert torch.equal(ours[rank]["end"], ddp[rank]["end"])
        for one, other in zip(ours[rank]["notes"], ddp[rank]["notes"], strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("optimizer", ["sgd", "fused"])
@pytest.mark.parametrize(
    "loop", [{"clip": 0.1}, {"accumulate": 3}, {"schedule": True, "look": True}], ids=lambda o: next(iter(o))
)
def test_clipping_accumulation_and_schedules(two, loop, optimizer):
    ours = two.run("train", optimizer=optimizer, **HELD, **loop)
    ddp = two.run("train", optimizer=optimizer, way="ddp", **loop)
    for rank in range(2):
        same(ours[rank], ddp[rank])


@pytest.mark.parametrize(
    ("scenario", "other"), [("low_precision", "by hand"), ("autocast", "ddp"), ("leaves_out", "ddp")]
)
def test_precisions_and_layers_left_out(two, scenario, other):
    ours, expected = two.run(scenario, way="ours", **HELD), two.run(scenario, way=other)
    assert all(torch.equal(ours[rank], expected[rank]) for rank in range(2))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(two, reentrant):
    options = {"policy": "reverse_first_k", "k": "all"}
    ours, ddp = two.run("checkpoints", way="ours", reentrant=reentrant, **options), {}
    ddp = two.run("checkpoints", way="ddp", reentrant=reentrant)
    assert all(torch.equal(ours[rank], ddp[rank]) for rank in range(2))


@pytest.mark.parametrize(("k", "expected"), [(0, [4, 3, 2, 1, 0]), (2, [4, 3, 2, 0, 1]), (5, [0, 1, 2, 3, 4])])
def test_the_first_layers_come_last_and_updates_wait_for_their_use(two, k, expected):
    seen = two.run("orders", k=k)[0]
    assert seen["came"] == expected
    assert not any(seen["pending"][at][number] for at in range(5) for number in range(at))


def test_a_checkpoint_in_mid_run_goes_on_bit_for_bit(two):
    for result in two.run("resumes", at=3, steps=7, **HELD).values():
        assert torch.equal(result["end"], result["resumed"])


def test_a_byte_budget_is_kept(two):
    free, bound = two.run("holds", byte_budget=None)[0], two.run("holds", byte_budget=600)[0]
    assert free["held"] > 600 >= bound["held"] > 0
    assert torch.equal(free["end"], bound["end"])


def test_models_that_differ_are_refused(two):
    answers = two.run("differs")
    assert all("give DataParallel the same on all ranks" in answer for answer in answers.values())


def test_where_it_does_not_pay_steps_stay_in_stock_order(two):
    explained = two.run("auto")[0]["explained"]
    assert "communication is" in explained
    assert "measured" in explained or "in stock order, with a barrier" in explained


@pytest.mark.parametrize("when", ["early", "late"])
def test_a_backward_that_fails_cannot_go_on(two, when):
    for answer in two.run("fails", when=when).values():
        assert answer["said"][0] == "as the test wants it"
        assert "start again from a checkpoint" in answer["said"][1]


@pytest.mark.parametrize("policy", [{"policy": "in_order"}, {"policy": "no_barrier"}, HELD], ids=lambda o: o["policy"])
def test_checkpoints_inside_of_a_backward(two, policy):
    ours = two.run("checkpoints", way="ours", reentrant=True, **{**policy, "bucket_bytes": 1})
    ddp = two.run("checkpoints", way="ddp", reentrant=True)
    assert all(torch.equal(ours[rank], ddp[rank]) for rank in range(2))


def test_options_that_differ_are_refused(two):
    answers = two.run("options_differ")
    assert all("the options" in answer for answer in answers.values())


def test_a_wrapper_inside_of_a_module_loads_what_it_has_saved(two):
    assert all(two.run("nests").values())


def test_copies_of_the_wrapper_are_plain_models(two):
    for kind, same_weights, trains in two.run("copies").values():
        assert (kind, same_weights, trains) == ("Sequential", True, True)


def test_groups_that_are_a_part_of_all_ranks(four):
    ends = four.run("in_parts")
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[2], ends[3])
    assert not torch.equal(ends[0], ends[2])


@pytest.mark.parametrize("policy", ["no_barrier", "auto"])
def test_four_ranks_stay_together(four, policy):
    ours = four.run("train", kind="gpt", steps=8, policy=policy)
    ddp = four.run("train", kind="gpt", steps=8, way="ddp")
    for rank in range(4):
        assert torch.equal(ours[rank]["end"], ours[0]["end"])
        torch.testing.assert_close(ours[rank]["end"], ddp[rank]["end"], rtol=1e-5, atol=1e-6)
