import math

import torch

from gradweave.parallel.daso.loss import LossScale, ReportedLoss


def test_a_reported_loss_is_the_mean_since_it_was_taken():
    loss = ReportedLoss()
    assert math.isnan(loss.take())
    loss.epoch = 3.0
    assert loss.take() == 3.0
    loss.add(torch.tensor(1.0))
    loss.add(torch.tensor(2.0, dtype=torch.bfloat16))
    assert loss.take() == 1.5
    assert math.isnan(loss.take())


def test_without_a_scaler_there_is_no_scale():
    for scaler in (None, torch.amp.GradScaler("cpu", enabled=False)):
        scale = LossScale(scaler, torch.device("cpu"))
        assert not scale.is_used
        assert scale.value == 1.0
        assert scale.layout().numel == 0


def test_gradients_follow_a_scale_that_changes():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scale = LossScale(scaler, torch.device("cpu"))
    p = torch.nn.Parameter(torch.ones(2))
    p.grad = torch.full((2,), 8.0)
    before = scale.value
    scale.layout().store([torch.tensor([2.0])])
    scale.rescale([p, torch.nn.Parameter(torch.ones(1))], before)
    assert (scale.value, scaler.get_scale(), p.grad.tolist()) == (2.0, 2.0, [2.0, 2.0])
