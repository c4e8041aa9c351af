import pytest
import torch

from parallel.daso.worlds import World


@pytest.mark.parametrize(("at", "every", "wait"), [(3, 4, 3), (5, 4, 3), (4, 2, 2), (1, 3, 1), (6, 6, 0)])
@pytest.mark.parametrize("options", [{}, {"payload": "float32", "warm_up": 2}])
def test_resuming_is_the_uninterrupted_run_bit_for_bit(two_by_two, tmp_path, at, every, wait, options):
    found = two_by_two.run("resume", at=at, steps=11, folder=str(tmp_path), every=every, wait=wait, **options)
    for whole, end, resumed, resumed_end in found.values():
        assert torch.equal(whole, resumed)
        assert torch.equal(end, resumed_end)


def test_resuming_the_published_rules(two_by_two, tmp_path):
    options = {"mode": "paper", "warm_up": 0, "cool_down": 0}
    found = two_by_two.run("resume", at=5, steps=9, folder=str(tmp_path), **options)
    assert all(torch.equal(whole, resumed) for whole, _, resumed, _ in found.values())


@pytest.mark.parametrize(("nodes", "places"), [(3, 1), (1, 2), (1, 1)])
def test_resuming_on_other_nodes(two_by_two, tmp_path, nodes, places):
    saved = two_by_two.run("save_under_way", steps=4, folder=str(tmp_path), every=4, wait=4)
    assert saved[0][1], "the first rank carries what is under way"
    (tmp_path / "world").mkdir()
    world = World(tmp_path / "world", nodes, places)
    try:
        found = world.run("load_elsewhere", folder=str(tmp_path), steps=4)
    finally:
        world.close()
    begin, end, steps = found[0]
    assert steps >= 8
    assert not torch.equal(begin, saved[0][0]), "what had arrived is merged"
    assert torch.allclose(begin, saved[0][0], atol=0.5)
    assert all(torch.equal(begin, other[0]) and torch.equal(end, other[1]) for other in found.values())


def test_resuming_with_layers_that_were_unfrozen_on_the_way(two_by_two, tmp_path):
    for whole, resumed in two_by_two.run("resume_unfrozen", folder=str(tmp_path)).values():
        assert torch.equal(whole, resumed)


def test_resuming_behind_a_step_that_one_node_left_out(two_by_two, tmp_path):
    found = two_by_two.run("save_behind_a_skip", folder=str(tmp_path))
    assert all(torch.equal(found[0][1], end) for _, end, _, _ in found.values())
    for whole, end, resumed, resumed_end in found.values():
        assert torch.equal(whole, resumed)
        assert torch.equal(end, resumed_end)


def test_checkpoints_of_different_steps_do_not_mix(two_by_two):
    found = two_by_two.run("resume_misfit")
    assert {steps for _, steps, _ in found.values()} == {4}
    assert all(torch.equal(found[0][0], begin) and torch.equal(found[0][2], end) for begin, _, end in found.values())


def test_a_state_goes_with_its_weights(two_by_two):
    for said in two_by_two.run("wrong_weights").values():
        assert "load this rank's model and optimizer state behind constructing DASO" in said
