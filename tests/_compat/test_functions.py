"""Modes, transforms and tracers around torch's functions are counted, left and entered."""

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from gradweave._compat import functions


class Seen(TorchFunctionMode):
    """Keeps the names of the functions that it sees."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    """Keeps the operations that it sees."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_modes_are_counted_and_the_innermost_can_be_left():
    with Seen() as outer, Seen() as inner:
        assert functions.other_function_modes() == 2
        assert functions.function_modes() == [outer, inner]
        with functions.without_function_mode(Seen):
            torch.ones(1).exp()
        assert "exp" in outer.names
        assert "exp" not in inner.names
        with functions.without_new_function_modes(1):
            torch.ones(1).sin()
        assert "sin" not in outer.names
    with torch.device("cpu"):
        assert [functions.is_device_mode(mode) for mode in functions.function_modes()] == [True]


def test_a_mode_is_left_from_under_others():
    first, second = Seen(), Seen()
    functions.enter_function_mode(first)
    functions.enter_function_mode(second)
    functions.leave_function_mode(first)
    assert functions.function_modes() == [second]
    functions.leave_function_mode(second)
    assert functions.function_modes() == []


def test_a_functional_part_by_part_shows_the_functions_that_it_calls():
    x, w = torch.ones(1, 4), torch.ones(4)
    with Seen() as whole:
        torch.nn.functional.layer_norm(x, (4,), w)
    with Seen() as parts:
        functions.part_by_part(torch.nn.functional.layer_norm)(x, (4,), w)
    assert whole.names[0] == "layer_norm"
    assert len(parts.names) >= 1
    patched = functions.part_by_part(_doubled, _factor=3)
    assert patched(2) == 6


_factor = 2


def _doubled(x):
    return _factor * x


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap])
def test_function_transforms_are_seen(transform):
    seen = []

    def look(x):
        seen.append(functions.in_function_transform())
        with functions.outside_function_transforms():
            seen.append(functions.in_function_transform())
        return x.sum()

    transform(look)(torch.ones(2))
    assert seen == [True, False]
    assert not functions.in_function_transform()


def test_forward_mode_derivatives_are_seen():
    assert not functions.in_forward_mode()
    with torch.autograd.forward_ad.dual_level():
        assert functions.in_forward_mode()


def test_dispatch_modes_are_counted_and_left():
    assert functions.dispatch_modes() == 0
    with Operations() as mode:
        assert functions.dispatch_modes() == 1
        with functions.without_dispatch_modes():
            torch.ones(1).exp()
        assert mode.seen == []
        torch.ones(1).exp()
        assert mode.seen


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_tracers_are_seen_and_what_they_must_not_see_is_hidden():
    seen = []

    def traced(x):
        seen.append(functions.is_being_traced())
        with functions.not_traced():
            seen.append(functions.is_being_traced())
        return x + 1

    torch.jit.trace(traced, torch.ones(1), check_trace=False)
    assert seen == [True, False]
    assert not functions.is_being_traced()


def test_leaves_of_containers():
    nested = {"a": [1, (2, 3)], "b": 4}
    assert functions.flat_leaves(nested) == [1, 2, 3, 4]
    assert functions.map_nested(lambda n: -n, nested) == {"a": [-1, (-2, -3)], "b": -4}
