"""Layers that have vectors and layers that do not; a model whose hooks do not run is found out in the first step."""

import copy
import gc
import logging
import pickle
from weakref import ref

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from gradweave._logging import _log_once
from gradweave.errors import ArgumentError, GradweaveError
from gradweave.optim import Eva, EvaF
from gradweave.optim.statistics.coverage import Capture
from optim.models import loss_of, make_mlp, rows, train, weights
from optim.statistics.collected import ALL, collect, records


def test_copies_of_a_model_have_no_part_in_it():
    model = make_mlp()
    capture = collect(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        loss_of(other, rows(1)[0]).backward()
    assert all(record.count_nonzero() == 0 for record in records(capture))
    capture.remove()
    loss_of(model, rows(1)[0]).backward()
    assert all(record.count_nonzero() == 0 for record in records(capture))


def test_what_is_not_covered():
    class Odd(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    embedding, head = nn.Embedding(4, 3), nn.Linear(3, 4)
    head.weight = embedding.weight
    frozen = nn.Linear(2, 2).requires_grad_(False)
    model = nn.ModuleList(
        [nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), Odd(2, 2), embedding, head, frozen, nn.LayerNorm(2),
         nn.Linear(2, 3)]
    )  # fmt: skip
    assert [layer.name for layer in Capture(model, ALL).layers] == ["6"]


@pytest.mark.parametrize(("arguments", "has"), [({}, False), ({"faithful": True}, True), ({"reference": True}, True)])
def test_a_head_over_the_words_of_an_embedding_has_none(arguments, has):
    """But other layers of its shape have, and the authors' rules cover it."""
    model = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 3), nn.Linear(3, 7))
    optimizer = EvaF(model, **arguments)
    covered = {id(p) for group in optimizer.param_groups if group["rule"] == "vectors" for p in group["params"]}
    assert id(model[1].weight) in covered
    assert (id(model[4].weight) in covered) is has


def test_hooks_go_with_their_optimizer():
    model = nn.Sequential(nn.Linear(4, 3))
    for _ in range(3):
        optimizer = EvaF(model)
    assert len(model[0]._forward_hooks) == 1
    with pytest.raises(ArgumentError, match="lr="):
        EvaF(model, lr=-1)
    assert len(model[0]._forward_hooks) == 1
    optimizer.detach()
    assert not model[0]._forward_hooks


compiling = pytest.mark.filterwarnings("ignore:.*should not be instantiated")


@compiling
@pytest.mark.parametrize("cls", [Eva, EvaF])
def test_a_model_that_was_compiled_and_run_before(cls):
    torch.compiler.reset()
    model, other = make_mlp(), make_mlp()
    compiled = torch.compile(model, backend="eager")
    loss_of(compiled, rows(1)[0]).backward()
    model.zero_grad()
    optimizer = cls(model)
    before = weights(model)
    loss_of(compiled, rows(1)[0]).backward()
    with pytest.raises(GradweaveError, match=r"torch\.compiler\.reset\(\)"):
        optimizer.step()
    assert torch.equal(weights(model), before)
    optimizer.zero_grad()
    torch.compiler.reset()
    train(compiled, optimizer, rows())
    train(other, cls(other), rows())
    assert torch.equal(weights(model), weights(other))


@compiling
@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_model_that_is_compiled_after(fullgraph):
    torch.compiler.reset()
    model, other = make_mlp(), make_mlp()
    optimizer = Eva(model)
    train(model, optimizer, rows(2))
    train(torch.compile(model, backend="eager", fullgraph=fullgraph), optimizer, rows())
    plain = Eva(other)
    train(other, plain, rows(2))
    train(other, plain, rows())
    assert torch.equal(weights(model), weights(other))


def test_a_step_of_zeros_makes_state_as_checkpoints_need_it():
    model = make_mlp()
    optimizer = Eva(model)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer, rows(1))


def test_layers_that_are_not_seen_are_named_once(caplog):
    _log_once.cache_clear()
    model = make_mlp()
    optimizer = Eva(model)
    loss_of(model, rows(1)[0]).backward()
    optimizer.state[model[2].weight]["record"].zero_()
    with caplog.at_level(logging.WARNING, logger="gradweave"):
        optimizer.step()
        optimizer.step()
    assert ["2 have gradients" in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize("cls", [Eva, EvaF])
def test_gradients_made_by_hand_are_used_as_they_are_with_a_warning(cls, caplog):
    _log_once.cache_clear()
    model = make_mlp()
    optimizer = cls(model)
    before = weights(model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with caplog.at_level(logging.WARNING, logger="gradweave"):
        optimizer.step()
    assert len(caplog.records) == 1
    assert not torch.equal(weights(model), before)


def test_autograd_nodes_are_not_held_where_a_loop_will_be_captured():
    kept, dropped = make_mlp(), make_mlp()
    optimizers = Eva(kept), Eva(dropped, capturable=True)

    def is_held(weight):
        return get_gradient_edge(weight).node.metadata.setdefault("seen", False)

    for model in (kept, dropped):
        get_gradient_edge(model[0].weight).node.metadata["seen"] = True
    assert [is_held(model[0].weight) for model in (kept, dropped)] == [True, False]
    del optimizers


def test_listening_ends_with_the_first_step_and_keeps_no_weight():
    model = make_mlp()
    weight = ref(model[0].weight)
    optimizer = Eva(model)
    del model, optimizer
    gc.collect()
    assert weight() is None
