import copy

import pytest
import torch
from torch import nn

from gradweave._runtime.deferred.pending import is_pending_gradient
from gradweave.parallel.data_parallel.gradients import pending_class


def pending():
    value = torch.zeros(3)
    waits = []

    def wait():
        waits.append(1)
        value.__class__ = torch.Tensor
        value.fill_(2.0)

    value.__class__ = pending_class(wait)
    return value, waits


@pytest.mark.parametrize(
    "use",
    [
        lambda g: g.sum(), lambda g: g.tolist(), lambda g: g.numpy(), lambda g: g.mul_(1), lambda g: g[0].item(), repr,
        copy.deepcopy, lambda g: torch.stack([g]), lambda g: torch._foreach_norm([g]),
        lambda g: g.data, lambda g: g.clone(),
    ],
)  # fmt: skip
def test_whoever_looks_waits_once(use):
    gradient, waits = pending()
    assert is_pending_gradient(gradient)
    use(gradient)
    use(gradient)
    assert waits == [1]
    assert not is_pending_gradient(gradient)
    assert gradient.tolist() == [2.0] * 3


def test_what_it_is_can_be_asked_without_waiting():
    gradient, waits = pending()
    assert (gradient.dtype, gradient.device.type, gradient.is_sparse) == (torch.float32, "cpu", False)
    assert gradient.layout is torch.strided
    assert waits == []


def test_clipping_and_optimizers_wait():
    parameter = nn.Parameter(torch.ones(3))
    gradient, waits = pending()
    parameter.grad = gradient
    assert parameter.grad is gradient
    assert float(nn.utils.clip_grad_norm_([parameter], 100.0)) == pytest.approx(12**0.5)
    assert waits == [1]
    parameter.grad, waits = pending()
    torch.optim.AdamW([parameter], lr=0.1, fused=True).step()
    assert waits == [1]
