"""Values of hyperparameters that are refused, and the documentation that constructors share."""

import inspect
import re

import pytest
import torch

from gradweave.errors import ArgumentError
from gradweave.optim import Eva, EvaF, EvaS
from gradweave.optim.eva_s import OURS as EVA_S
from gradweave.optim.hyperparameters import AUTHORS, OURS
from optim.models import make_mlp

FAMILY = [Eva, EvaF, EvaS]


every = pytest.mark.parametrize("cls", FAMILY)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"damping": 0.0}, "damping=0.0: give a positive number"),
        ({"lr": -1.0}, "lr=-1.0"),
        ({"lr": torch.ones(2)}, "give a tensor of one element"),
        ({"momentum": -0.1}, "momentum=-0.1"),
        ({"running_average": 0.0}, "running_average=0.0"),
        ({"kl_clip": 0.0}, "kl_clip=0.0"),
        ({"first_order": "lion"}, "use one of sgd, adamw"),
        ({"faithful": True, "reference": True}, "not both"),
    ],
)
@every
def test_bad_arguments_are_named(cls, arguments, message):
    with pytest.raises(ArgumentError, match=message):
        cls(make_mlp(), **arguments)


@every
@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"damping": 0.0}, "damping="), ({"damping": float("nan")}, "damping="), ({"lr": -1}, "lr="),
        ({"running_average": 0.0}, "running_average="), ({"betas": (1.5, 0.9)}, "betas="), ({"eps": -1}, "eps="),
        ({"rule": "adam"}, "rule="),
    ],
)  # fmt: skip
def test_bad_arguments_of_groups_are_named(cls, group, message):
    model = make_mlp()
    with pytest.raises(ArgumentError, match=message):
        cls(model, [{"params": list(model.parameters()), **group}])


@every
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": "0.1"}, "lr='0.1'"),
        ({"momentum": 2}, "momentum=2"),
        ({"momentum": 1.0}, "momentum=1.0"),
        ({"weight_decay": "no"}, "weight_decay='no'"),
        ({"damping": "0.1"}, "damping='0.1'"),
        ({"first_order_lr": "0.1"}, "first_order_lr='0.1'"),
        ({"first_order_lr": -1}, "first_order_lr=-1"),
        ({"betas": 0.9}, "betas=0.9"),
        ({"betas": ("0.9", 0.99)}, "betas='0.9'"),
        ({"running_average": [1]}, "running_average="),
        ({"params": 0.1}, "params=0.1: give parameters"),
        ({"params": "weight"}, "params='weight'"),
    ],
)
def test_what_is_no_number_is_refused_and_leaves_no_hook(cls, arguments, message):
    model = make_mlp()
    with pytest.raises(ArgumentError, match=message):
        cls(model, **arguments)
    assert not any(module._forward_hooks for module in model.modules())


@every
def test_each_argument_is_documented_once(cls):
    documented = re.findall(r"^    (\w+): ", cls.__doc__.split("\nArgs:\n")[1], re.MULTILINE)
    assert sorted(documented) == sorted(inspect.signature(cls).parameters)


@every
@pytest.mark.parametrize(
    ("mode", "preset"), [({}, OURS), ({"faithful": True}, AUTHORS), ({"reference": True}, AUTHORS)]
)
def test_a_mode_fills_in_what_is_not_given(cls, mode, preset):
    preset = EVA_S if preset is OURS and cls is EvaS else preset
    group = cls(make_mlp(), weight_decay=0.3, **mode).param_groups[0]
    assert {name: group[name] for name in vars(preset)} == vars(preset)
    assert group["first_order_weight_decay"] == 0.3
    assert cls(make_mlp(), lr=0.0, damping=5.0, **mode).param_groups[0]["damping"] == 5.0
    assert cls(make_mlp(), lr=0.0, **mode).param_groups[0]["lr"] == 0.0
