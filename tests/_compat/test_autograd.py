"""What is asked of the backward that runs now, and of autograd's nodes."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradweave._compat.autograd import (
    NO_BACKWARD,
    at_end_of_backward,
    current_backward,
    gets_gradient,
    gradient_hooks,
    keeps_graph,
    kept_copy,
    lasting_node,
    notes_of_node,
    parameters_behind,
    saved_tensors_are_hooked,
    will_be_accumulated,
)


def seen_in_backward(look, backward=lambda y, p: y.sum().backward()):
    """What a function says in the backward of a layer."""
    layer, seen = nn.Linear(2, 2), []
    y = layer(torch.ones(1, 2))
    y.register_hook(lambda _: seen.append(look(layer.weight)))
    backward(y, layer.weight)
    return seen


def test_a_backward_has_a_number_and_an_end():
    assert current_backward() == NO_BACKWARD
    order = []
    (number,) = seen_in_backward(lambda _: (at_end_of_backward(lambda: order.append("end")), current_backward())[1])
    assert number > NO_BACKWARD
    assert order == ["end"]
    assert current_backward() == NO_BACKWARD


def test_a_graph_that_is_kept_is_told_from_one_that_is_not():
    assert seen_in_backward(lambda _: keeps_graph()) == [False]
    assert seen_in_backward(lambda _: keeps_graph(), lambda y, _: y.sum().backward(retain_graph=True)) == [True]


@pytest.mark.parametrize(
    ("backward", "accumulated", "gets"),
    [
        (lambda y, _: y.sum().backward(), True, True),
        (lambda y, p: torch.autograd.grad(y.sum(), [p]), False, True),
        (lambda y, p: y.sum().backward(inputs=[p]), True, True),
    ],
)
def test_gradients_that_are_accumulated_or_returned(backward, accumulated, gets):
    assert seen_in_backward(will_be_accumulated, backward) == [accumulated]
    assert seen_in_backward(gets_gradient, backward) == [gets]


def test_parameters_behind_a_result_and_their_hooks():
    layer = nn.Linear(2, 2)
    assert set(parameters_behind(layer(torch.ones(1, 2)).sum())) == {layer.weight, layer.bias}
    assert gradient_hooks(layer.weight) == 0
    layer.weight.register_hook(lambda g: g)
    layer.weight.register_post_accumulate_grad_hook(lambda p: None)
    assert gradient_hooks(layer.weight) == 2


def test_a_node_lasts_through_a_view_and_keeps_notes_and_its_input():
    x = torch.ones(3, 2)
    y = nn.Linear(2, 2)(x)
    node, number = lasting_node(y.view(2, 3))
    assert (node, number) == (y.grad_fn, 0)
    assert lasting_node(y[:1]) is None
    notes_of_node(node)["a"] = 1
    assert notes_of_node(y.grad_fn)["a"] == 1
    assert kept_copy(node).data_ptr() == x.data_ptr()
    y.sum().backward()
    assert kept_copy(node) is None


def test_hooks_on_saved_tensors_are_seen():
    assert not saved_tensors_are_hooked()
    seen = []
    checkpoint(
        lambda x: (seen.append(saved_tensors_are_hooked()), x.exp())[1],
        torch.ones(1, requires_grad=True),
        use_reentrant=False,
    ).backward()
    assert seen[0]
