import copy
import pickle

import pytest
import torch
from torch import nn

from gradweave._runtime.deferred.pending_gradient import PendingGradient, make_gradient_pending, make_gradient_plain
from gradweave.errors import GradweaveError


def pending():
    value = torch.zeros(3)
    waits = []

    def wait():
        waits.append(1)
        make_gradient_plain(value)
        value.fill_(2.0)

    make_gradient_pending(value, wait)
    return value, waits


@pytest.mark.parametrize(
    "use",
    [
        lambda g: g.sum(), lambda g: g.tolist(), lambda g: g.numpy(), lambda g: g.mul_(1), lambda g: g[0].item(), repr,
        copy.deepcopy, lambda g: torch.stack([g]), lambda g: torch._foreach_norm([g]),
        lambda g: g.data, lambda g: g.clone(),
    ],
)  # fmt: skip
def test_every_use_waits_once(use):
    gradient, waits = pending()
    assert isinstance(gradient, PendingGradient)
    use(gradient)
    use(gradient)
    assert waits == [1]
    assert type(gradient) is torch.Tensor
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


def test_gradients_of_several_owners_are_each_resolved_by_their_own():
    (one, waits_of_one), (other, waits_of_other) = pending(), pending()
    assert torch.add(one, other).tolist() == [4.0] * 3
    assert (waits_of_one, waits_of_other) == ([1], [1])


def test_a_plain_gradient_carries_nothing_of_what_resolved_it():
    gradient, _ = pending()
    copied = pickle.loads(pickle.dumps(gradient))
    assert copied.tolist() == [2.0] * 3
    assert vars(gradient) == {}


@pytest.mark.parametrize("use", [lambda g: g.norm(), copy.deepcopy, pickle.dumps])
def test_one_that_is_never_resolved_is_an_error(use):
    gradient = torch.zeros(3)
    make_gradient_pending(gradient, lambda: None)
    with pytest.raises(GradweaveError, match="given up"):
        use(gradient)
