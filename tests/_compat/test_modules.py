"""Hooks of modules are counted and suspended; compiled and parametrized modules are told from others."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gradweave._compat import modules


def test_hooks_before_and_after_a_forward_and_on_loading():
    layer = nn.Linear(2, 2)
    assert not modules.has_one_hook(layer)
    after = layer.register_forward_hook(lambda *_: None)
    assert modules.has_one_hook(layer)
    layer.register_forward_pre_hook(before := lambda *_: None)
    assert not modules.has_one_hook(layer)
    assert modules.forward_pre_hooks(layer) == [before]
    after.remove()
    layer.register_load_state_dict_post_hook(loaded := lambda *_: None)
    assert modules.load_hooks(layer) == [loaded]
    assert not modules.has_backward_hooks(layer)
    layer.register_full_backward_hook(lambda *_: None)
    assert modules.has_backward_hooks(layer)


def test_hooks_of_all_modules_and_optimizers():
    assert not modules.hooks_of_all()
    for register in (
        nn.modules.module.register_module_forward_hook,
        nn.modules.module.register_module_full_backward_hook,
        register_optimizer_step_pre_hook,
    ):
        handle = register(lambda *_: None)
        assert modules.hooks_of_all()
        handle.remove()
    assert not modules.hooks_of_all()


def test_suspended_hooks_are_not_called_but_those_that_compute_weights():
    model, calls = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), []
    model[0].register_forward_hook(lambda *_: calls.append("forward"))
    prune.l1_unstructured(model[1], "weight", amount=2)
    with modules.hooks_suspended(model):
        with torch.no_grad():
            model[1].weight_orig.fill_(3.0)
        model(torch.ones(1, 2))
        assert sorted(model[1].weight.flatten().tolist()) == [0, 0, 3, 3]
    assert calls == []
    model(torch.ones(1, 2))
    assert calls == ["forward"]


def test_compiled_modules():
    plain, in_place = nn.Linear(2, 2), nn.Linear(2, 2)
    outside = torch.compile(plain, backend="eager")
    in_place.compile(backend="eager")
    assert [modules.is_compiled(m) for m in (plain, outside, in_place)] == [False, True, True]
    assert [modules.is_compiled_outside(m) for m in (plain, outside, in_place)] == [False, True, False]
    assert modules.inside_of_compiled(outside) is plain
    assert modules.inside_of_compiled(in_place) is in_place


@pytest.mark.parametrize("made", [nn.Conv1d(1, 1, 1), nn.ConvTranspose2d(1, 1, 1)])
def test_classes_of_modules(made):
    assert isinstance(made, modules.ConvolutionModule)
    assert isinstance(nn.CrossEntropyLoss(), modules.CriterionModule)
    assert not modules.is_parametrized(made)
    assert modules.is_parametrized(parametrizations.weight_norm(nn.Linear(2, 2)))
