"""Stand-ins are found among nested arguments by their exact type."""

import torch

from gradweave._runtime.deferred.arguments import METADATA, of_type


class StandIn:
    """What is looked for."""


class Resolved:
    """What another one becomes when the first is resolved."""


def test_nested_arguments_are_searched_in_order():
    first, second = StandIn(), StandIn()
    assert list(of_type(([first], {"other": (1, second)}, {3}), StandIn)) == [first, second]
    assert list(of_type((type("Child", (StandIn,), {})(),), StandIn)) == []


def test_the_type_is_read_when_an_object_is_reached():
    first, second = StandIn(), StandIn()
    found = []
    for one in of_type((first, second), StandIn):
        found.append(one)
        second.__class__ = Resolved
    assert found == [first]


def test_metadata_is_what_needs_no_value():
    assert torch.Tensor.is_leaf.__get__ in METADATA
    assert torch.Tensor.shape.__get__ not in METADATA
    assert torch.Tensor.add not in METADATA
