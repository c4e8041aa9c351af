import pytest
import torch

from gradweave.compiler.tensor_forms import FUNCTIONS, IN_PLACE, new_value
from gradweave.errors import GradweaveError

aten = torch.ops.aten
X, Y, Z = torch.tensor([1.0, -2.0, 3.0]), torch.tensor([0.5, 4.0, 2.0]), torch.tensor([2.0, 3.0, 5.0])
CALLS = {
    "add": (aten.add.Tensor, (X, Y), {"alpha": 0.3}),
    "sub": (aten.sub.Tensor, (X, Y), {"alpha": 0.3}),
    "mul": (aten.mul.Tensor, (X, 0.3), {}),
    "div": (aten.div.Tensor, (X, 0.3), {}),
    "rsub": (aten.rsub.Scalar, (X, 0.3, 2.0), {}),
    "lerp": (aten.lerp.Scalar, (X, Y, 0.3), {}),
    "addcmul": (aten.addcmul.default, (X, Y, Z), {"value": 0.3}),
    "addcdiv": (aten.addcdiv.default, (X, Y, Z), {"value": 0.3}),
    "pow of a number": (aten.pow.Scalar, (0.3, X), {}),
    "pow by a number": (aten.pow.Tensor_Scalar, (Y, 0.3), {}),
    "where": (aten.where.ScalarOther, (X > 0, X, 0.3), {}),
    "gt": (aten.gt.Scalar, (X, 0.3), {}),
    "clamp": (aten.clamp.default, (X, -0.3, 0.3), {}),
    "clamp_min": (aten.clamp_min.default, (X, 0.3), {}),
}


def as_tensors(value):
    return torch.tensor(value) if isinstance(value, float) else value


@pytest.mark.parametrize("name", CALLS)
def test_a_tensor_in_the_place_of_a_number_gives_the_same(name):
    target, args, kwargs = CALLS[name]
    made = new_value(target, tuple(map(as_tensors, args)), {key: as_tensors(value) for key, value in kwargs.items()})
    torch.testing.assert_close(made, target(*args, **kwargs))


@pytest.mark.parametrize("target", [target for target, form in IN_PLACE.items() if form is not None], ids=str)
def test_in_place_operations_have_the_form_of_those_that_are_not(target):
    assert IN_PLACE[target] in FUNCTIONS


def test_a_copy_becomes_what_is_copied():
    assert new_value(aten.copy_.default, (X, Y), {}) is Y


def test_an_operation_without_a_form_is_named():
    with pytest.raises(GradweaveError, match=r"aten\.cumsum.*replay"):
        new_value(aten.cumsum.default, (X, 0), {})
