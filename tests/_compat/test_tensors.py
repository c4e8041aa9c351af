"""Who else refers to a tensor's memory, how often it was changed, and tensors without data."""

import numpy as np
import torch

from gradweave._compat import tensors
from gradweave._compat.functions import disabled_torch_function


def test_users_of_memory_are_counted():
    x = torch.ones(4)
    assert tensors.is_sole_user(x)
    assert tensors.storage_users(x) == 1
    view = x[:2]
    assert not tensors.is_sole_user(x)
    assert tensors.storage_users(x) == 2
    assert tensors.memory_of(view) == tensors.memory_of(x)
    assert tensors.is_view(view)
    assert not tensors.is_view(x)
    del view
    assert tensors.is_sole_user(x)
    assert not tensors.is_sole_user(torch.from_numpy(np.ones(4)))


def test_versions_count_changes_in_place_and_can_be_set():
    x = torch.ones(2)
    assert tensors.version_of(x) == 0
    x.add_(1)
    assert tensors.version_of(x) == 1
    tensors.set_version([x], [7])
    assert tensors.version_of(x) == 7
    alias = tensors.alias_of(x)
    assert alias.data_ptr() == x.data_ptr()
    assert type(tensors.alias_of(torch.nn.Parameter(x))) is torch.Tensor


def test_a_gradient_that_other_code_keeps_is_told_from_one_that_only_the_parameter_has():
    def grads(keep):
        p = torch.nn.Parameter(torch.ones(2))
        p.sum().backward()
        kept = p.grad if keep else None
        p.sum().backward()  # adds in place
        found = tensors.are_kept([p.grad])
        del kept
        return found

    assert grads(keep=True)
    assert not grads(keep=False)


def test_a_stand_in_has_a_shape_and_no_data():
    class StandIn(torch.Tensor):
        __torch_function__ = disabled_torch_function

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise NotImplementedError

    like = torch.ones(3, 2, dtype=torch.bfloat16).t()
    made = tensors.metadata_guard(StandIn, like)
    assert type(made) is StandIn
    assert (made.shape, made.stride(), made.dtype, made.device) == (like.shape, like.stride(), like.dtype, like.device)


def test_the_stream_of_a_cpu_is_the_default_one():
    assert tensors.stream_teller(torch.device("cpu"))() == 0
    assert tensors.use_count(torch.ones(1)) >= 1
