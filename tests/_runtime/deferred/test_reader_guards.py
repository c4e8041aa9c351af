"""Readers that do not ask a parameter's class are told of first; hooks come and go together."""

import copy

import pytest
import torch
from torch import nn

from gradweave._runtime.deferred.reader_guards import ReaderGuards


class Own(nn.Module):
    """A module that is not torch's, with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.inner = nn.Linear(2, 2)

    def forward(self, x):
        return self.inner(x) * self.scale


def guarded(model):
    heard = []
    guards = ReaderGuards(
        model,
        lambda params: heard.append([tuple(p.shape) for p in params]),
        lambda: heard.append("flush"),
        lambda: heard.append("traced"),
    )
    return guards, heard


def test_a_module_of_the_users_may_hand_its_parameters_to_anything():
    model = nn.Sequential(nn.Linear(2, 2), Own())
    guards, heard = guarded(model)
    model(torch.ones(1, 2))
    assert heard == [[(2,)]]
    guards.remove()
    model(torch.ones(1, 2))
    assert len(heard) == 1


def test_the_model_itself_has_one_hook():
    model = Own()
    guards, heard = guarded(model)
    assert len(model._forward_pre_hooks) == 1
    model(torch.ones(1, 2))
    assert heard == [[(2,)]]
    guards.remove()
    assert not model._forward_pre_hooks


def test_transforms_and_traces_take_all():
    model = nn.Sequential(nn.Linear(2, 2))
    _, heard = guarded(model)
    torch.func.vmap(model)(torch.ones(3, 2))
    assert heard == ["flush"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_model_that_is_traced():
    model = nn.Sequential(nn.Linear(2, 2))
    _, heard = guarded(model)
    torch.jit.trace(model, torch.ones(1, 2), check_trace=False)
    assert heard == ["traced"]


def test_a_copy_is_not_guarded():
    model = Own()
    _, heard = guarded(model)
    copy.deepcopy(model)(torch.ones(1, 2))
    assert heard == []


def test_hooks_that_cannot_all_be_placed_are_taken_back(monkeypatch):
    model = nn.Sequential(nn.Linear(2, 2), Own())
    register = nn.Module.register_forward_pre_hook

    def failing(module, *args, **named):
        if module is model:
            raise RuntimeError("no hook")
        return register(module, *args, **named)

    monkeypatch.setattr(nn.Module, "register_forward_pre_hook", failing)
    with pytest.raises(RuntimeError, match="no hook"):
        guarded(model)
    assert not any(module._forward_pre_hooks for module in model.modules())
