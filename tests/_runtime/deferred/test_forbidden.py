"""A forbidden gradient raises at every use, also from C++, and gives way to zeros when it is cleared."""

import copy
import pickle

import pytest
import torch
from torch import nn

from gradweave._runtime.deferred.forbidden import ForbiddenGradient, forbidden_gradient
from gradweave.errors import GradweaveError


@pytest.fixture
def p():
    p = nn.Parameter(torch.ones(2, 3))
    p.grad = forbidden_gradient(p, lambda use: GradweaveError(f"the gradient is gone, and {use} needs it"))
    return p


USES = {
    "sum": lambda p: p.grad.sum(),
    "write": lambda p: p.grad.mul_(2),
    "clone": lambda p: p.grad.clone(),
    "deepcopy": lambda p: copy.deepcopy(p.grad),
    "accumulate": lambda p: (p * 1).sum().backward(),
    "clip": lambda p: nn.utils.clip_grad_norm_([p], 1.0),
    "foreach": lambda p: torch._foreach_mul_([p.grad], 2.0),
    "numpy": lambda p: p.grad.numpy(),
    "tolist": lambda p: p.grad.tolist(),
    "data_ptr": lambda p: p.grad.data_ptr(),
    "storage": lambda p: p.grad.untyped_storage(),
    "share": lambda p: p.grad.share_memory_(),
    "pickle": lambda p: pickle.dumps(p.grad),
    "step": lambda p: torch.optim.SGD([p], lr=0.1).step(),
}


@pytest.mark.parametrize("use", USES)
def test_every_use_raises_the_error_of_its_owner(p, use):
    with pytest.raises(GradweaveError, match="the gradient is gone, and"):
        USES[use](p)
    assert torch.equal(p, torch.ones(2, 3))


def test_it_has_the_form_of_the_gradient(p):
    assert (p.grad.shape, p.grad.dtype, p.grad.device) == (p.shape, p.dtype, p.device)
    assert "2, 3" in repr(p.grad)


@pytest.mark.parametrize("clear", [lambda p: p.grad.zero_(), lambda p: torch._foreach_zero_([p.grad])])
def test_clearing_in_place_leaves_zeros(p, clear):
    clear(p)
    assert not isinstance(p.grad, ForbiddenGradient)
    assert torch.equal(p.grad, torch.zeros(2, 3))
