"""Nothing silently different: it is right, or refused on all ranks before any weight has changed, and nothing stays."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from parallel.daso.worlds import World, _free_port


def test_options_that_differ_between_ranks_are_refused_by_all(two_by_two):
    found = two_by_two.run("differing")
    ranks = [found[rank] for rank in range(4)]
    for name in ranks[0]:
        assert all(unchanged for _, unchanged in (each[name] for each in ranks)), name
        assert all(each[name][0] is not None for each in ranks), name
    for name in (
        "mode",
        "payload",
        "warm_up",
        "every",
        "wait",
        "on_failure",
        "average_gradients",
        "mesh",
        "order of parameters",
    ):
        assert len({each[name][0] for each in ranks}) == 1
        assert name in ranks[0][name][0]
        assert "give DASO the same on all ranks" in ranks[0][name][0]
    assert "lr of group 0" in ranks[0]["lr"][0]
    assert "is 0.2 on rank 3 and 0.1 on rank 0" in ranks[2]["lr"][0]
    assert "AdamW on rank 3" in ranks[1]["optimizer"][0]
    assert "DASO: rank 3 refuses, and so do all: LBFGS" in ranks[0]["LBFGS"][0]
    assert "takes several backwards" in ranks[3]["LBFGS"][0]
    assert "rank 2 refuses" in ranks[0]["timeout=-1"][0]
    assert "positive" in ranks[1]["timeout=-1"][0]


@pytest.mark.parametrize(
    ("name", "group"), [("Eva", "default"), ("EvaF", "default"), ("EvaS", "default"), ("Eva", "local")]
)
def test_ranks_of_a_node_stay_alike_with_an_optimizer_that_has_statistics_of_its_own(two_by_two, name, group):
    found = two_by_two.run("vectors", name=name, group=group)
    assert all(said is None for said, _, _ in found.values())
    for node in (0, 2):
        assert torch.equal(found[node][1], found[node + 1][1])
    assert torch.allclose(found[0][1][1], found[2][1][1], atol=1e-6), "while nodes are together, they are the same"
    assert not torch.equal(found[0][1][6], found[2][1][6])
    assert all(torch.equal(found[0][2], end) for _, _, end in found.values())


@pytest.mark.parametrize("group", ["world", "none"])
def test_another_group_of_the_optimizers_own_is_refused(two_by_two, group):
    for said, unchanged, _ in two_by_two.run("vectors", name="Eva", group=group).values():
        assert "is not the group that DASO averages gradients over" in said
        assert unchanged


def test_ranks_that_run_out_under_an_optimizer_that_averages_are_told_so(two_by_two):
    for said, unchanged in two_by_two.run("uneven_vectors").values():
        assert "run out of batches" in said
        assert unchanged


@pytest.mark.parametrize("layers", [(0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 1, 1)])
def test_layers_that_only_some_ranks_begin_to_train_are_refused_by_all(two_by_two, layers):
    found = two_by_two.run("unfreezes", layers=layers)
    if layers == (0, 0, 0, 0):
        assert [each for each, *_ in found.values()] == [None] * 4
        return
    for rank, (said, number, moved) in found.items():
        assert f"trained from now on, on rank {rank}, and not so on rank" in said
        assert (number, moved) == (3, False)


def test_parts_that_not_all_ranks_use_under_an_optimizer_that_averages(two_by_two):
    found = two_by_two.run("parts_with_vectors", steps=4)
    for node in (0, 2):
        alike = torch.equal(found[node][1], found[node + 1][1])
        assert (alike and found[node][0] is None) or "Error" in found[node][0], found


@pytest.mark.parametrize("average_gradients", [True, False])
def test_an_optimizer_with_noise_of_its_own_is_found_in_the_first_steps(two_by_two, average_gradients):
    for said, number in two_by_two.run("noisy", average_gradients=average_gradients).values():
        assert said.startswith("DASO with Noisy: before update")
        assert "weights differ between ranks" in said
        assert "noise" in said
        assert number <= 2


@pytest.mark.parametrize(
    "how",
    ["DDP first", "DDP of a part first", "DDP behind", "local DDP behind", "compiled under DDP",
     "part of a module under DDP", "Accelerate behind", "FSDP behind"],
)  # fmt: skip
def test_what_else_averages_is_found_before_it_has(two_by_two, how):
    for said, number, moved in two_by_two.run("averaged_twice", how=how).values():
        assert said is not None
        assert "averages gradients already" in said
        assert ("FSDP" if "FSDP" in how else "DistributedDataParallel") in said
        assert number <= 0
        assert not moved


@pytest.mark.parametrize("how", ["evaluated under DDP", "DDP that is not used"])
def test_wrappers_that_average_nothing_do_no_harm(two_by_two, how):
    for said, number, moved in two_by_two.run("averaged_twice", how=how).values():
        assert said is None
        assert (number, moved) == (3, True)


def test_a_failed_attach_leaves_nothing_behind(two_by_two):
    found = two_by_two.run("failed_attach")
    assert {rank: left for rank, (left, _) in found.items()} == {rank: {} for rank in found}
    assert all(torch.equal(found[0][1], weights) for _, weights in found.values())


@pytest.mark.parametrize("how", ["finish", "detach", "neither"])
def test_many_uses_leave_no_files_and_threads_behind(two_by_two, how):
    for first, last in two_by_two.run("used_often", times=5, how=how).values():
        assert last[0] <= first[0]
        assert last[1] <= first[1]


def test_two_exchanges_at_a_time_do_not_wait_for_each_other(two_by_two):
    found = two_by_two.run("paper_in_turn", steps=40)
    assert [result[:3] for result in found.values()] == [(None, 0, 0)] * 4
    assert all(torch.equal(found[0][3], weights) for *_, weights in found.values())


def test_two_exchanges_that_fail_at_a_time_leave_the_others_together(tmp_path):
    world = World(tmp_path, 3, 1)
    try:
        world.ask("paper_in_turn", range(3), steps=30, die=(1, 7), on_failure="continue")
        found = world.answers([0, 2])
    finally:
        world.close()
    assert [result[0] for result in found.values()] == [None, None]
    assert [result[2] for result in found.values()] == [1, 1], (
        "the second one counts for nobody, and is not called again"
    )
    assert torch.equal(found[0][3], found[2][3])


def test_one_node_ends_with_the_same_statistics(two_by_two):
    found = two_by_two.run("one_node")
    assert all(torch.equal(found[0][0], statistics) for statistics, _ in found.values())
    assert {steps for _, steps in found.values()} == {5}


@pytest.mark.parametrize("counts", [[7, 7, 7, 7], [7, 7, 3, 3], [6, 7, 7, 5]])
def test_standing_by_does_not_count_as_training(two_by_two, counts):
    assert set(two_by_two.run("steps_counted", counts=counts).values()) == {(7, 7)}


@pytest.mark.parametrize("how", ["finish", "destroyed before", "neither"])
def test_a_program_that_trained_well_ends_well(tmp_path, how):
    port, processes = str(_free_port()), []
    for rank in range(2):
        own = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        path = f"{Path(__file__).parents[3] / 'src'}:{Path(__file__).parents[2]}"
        given = {**os.environ, **own, "MASTER_PORT": port, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        call = [sys.executable, str(Path(__file__).parent / "program.py"), how]
        processes.append(
            subprocess.Popen(call, env=given, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    try:
        said = [process.communicate(timeout=100)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], said
    assert ["trained" in text for text in said] == [True, True]
    assert not any("terminate" in text for text in said)
