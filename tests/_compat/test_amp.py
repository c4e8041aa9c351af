"""A GradScaler's tensors, and what torch does with them, are where they are looked for."""

import torch

from gradweave._compat.amp import ready_scaler_tensors, scaler_tensors, unscale_in_place, update_scale_in_place


def test_a_scaler_is_ready_before_and_after_its_first_use():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scale, growth = ready_scaler_tensors(scaler, torch.device("cpu"))
    assert (scale.item(), growth.item()) == (8.0, 0)
    assert ready_scaler_tensors(scaler, torch.device("cpu"))[0] is scale
    assert scaler_tensors(scaler)[0] is scale


def test_gradients_are_unscaled_and_what_is_not_finite_is_noted():
    gradients, found = [torch.tensor([2.0, 4.0]), torch.tensor([float("inf")])], torch.zeros(1)
    unscale_in_place(gradients[:1], found, torch.tensor(0.5))
    assert gradients[0].tolist() == [1.0, 2.0]
    assert not found
    unscale_in_place(gradients, found, torch.tensor(1.0))
    assert found


def test_a_scale_backs_off_and_grows():
    scale, growth = torch.tensor(8.0), torch.tensor(0, dtype=torch.int32)
    update_scale_in_place(scale, growth, torch.tensor(1.0), 2.0, 0.5, 1)
    assert scale == 4
    update_scale_in_place(scale, growth, torch.tensor(0.0), 2.0, 0.5, 1)
    assert scale == 8
