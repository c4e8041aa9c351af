import torch
from torch import nn

from compiler.models import adamw
from gradweave.compiler.step_state import StepState


def stepped():
    params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    optimizer = adamw(params)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.zero_grad()
    return params, StepState(optimizer), optimizer


def test_sums_are_zero_until_there_is_a_gradient():
    params, state, _ = stepped()
    sums = state.sums_for(params)
    assert [total.tolist() for total in sums] == [[0.0] * 2, [0.0] * 3]
    sums[0].fill_(2)
    state.show_sums(params)
    assert params[0].grad is sums[0]
    assert state.sums_for(params)[0].tolist() == [2.0, 2.0]
    params[0].grad = None
    assert state.sums_for(params)[0].tolist() == [0.0, 0.0]


def test_a_gradient_of_others_is_copied_into_the_sum():
    params, state, _ = stepped()
    (before, _) = state.sums_for(params)
    params[0].grad = torch.full((2,), 5.0)
    (after, _) = state.sums_for(params)
    assert after is before
    assert after.tolist() == [5.0, 5.0]
    assert params[0].grad is not after


def test_a_parameter_of_another_type_has_a_new_sum():
    params, state, _ = stepped()
    (before, _) = state.sums_for(params)
    params[0].data = params[0].data.double()
    (after, _) = state.sums_for(params)
    assert after is not before
    assert after.dtype is torch.float64


def test_counts_are_kept_while_they_fit():
    params, state, optimizer = stepped()
    counts = state.counts(params)
    assert state.counts(params) is counts
    assert state.is_current(counts)
    optimizer.state[params[0]]["step"].fill_(9)
    assert not state.is_current(counts)
    assert state.has(counts)
    assert state.counts(params) is not counts
    assert not state.has(counts)
    state.release_counts()
    assert [float(optimizer.state[p]["step"]) for p in params] == [9.0, 1.0]
