"""Attachments claim layers and optimizers; copies are stock, and what is gone claims nothing."""

import copy
import gc
import io
from contextlib import ExitStack

import pytest
import torch
from torch import nn

from gradweave._runtime.claims import (
    Technique,
    claim_model,
    claim_optimizer,
    claims_on,
    holders_of,
    is_claimed,
    pipeline_part,
)


class Holder:
    """Stands for an attachment."""


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))


@pytest.fixture
def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_claim_is_found_on_the_model_its_parts_and_what_is_around_it(model):
    holder = Holder()
    with ExitStack() as undo:
        claim_model(model, Technique.REORDER, holder, undo)
        for part in (model, model[0], model[1], nn.Sequential(model[1])):
            assert holders_of(part, Technique.REORDER) == [holder]
            assert not is_claimed(part, Technique.DASO)
        assert not is_claimed(model[1][0], Technique.REORDER), "a layer without parameters carries nothing"
    assert not claims_on(model)
    assert not any(module._load_state_dict_post_hooks for module in model.modules())


def test_parameters_that_are_claimed_are_those_of_their_layers(model):
    with ExitStack() as undo:
        holder, own = Holder(), frozenset(map(id, model[0].parameters()))
        claim_model(model, Technique.FUSE, holder, undo, params=own)
        assert [claim.params for claim in claims_on(model, Technique.FUSE)] == [own]
        assert not is_claimed(model[1], Technique.FUSE)


def test_copies_and_pickles_of_a_claimed_model_are_stock(model):
    with ExitStack() as undo:
        holder = Holder()
        claim_model(model, Technique.DASO, holder, undo)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for stock in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            assert not claims_on(stock)
        assert is_claimed(model, Technique.DASO)


def test_an_attachment_that_is_gone_claims_nothing(model, optimizer):
    undo, holder = ExitStack(), Holder()
    claim_model(model, Technique.DASO, holder, undo)
    claim_optimizer(optimizer, Technique.DASO, holder, undo)
    assert is_claimed(model, Technique.DASO)
    assert is_claimed(optimizer, Technique.DASO)
    del holder
    gc.collect()
    assert not claims_on(model)
    assert not claims_on(optimizer)


def test_an_optimizer_keeps_an_attachment_alive_if_it_is_told_to(optimizer):
    undo = ExitStack()
    claim_optimizer(optimizer, Technique.FUSE, Holder(), undo, keep_alive=True)
    gc.collect()
    assert is_claimed(optimizer, Technique.FUSE)
    undo.close()
    assert not is_claimed(optimizer, Technique.FUSE)
    assert "_gradweave_claims" not in vars(optimizer)


def test_claims_are_withdrawn_one_by_one(model, optimizer):
    first, second = ExitStack(), ExitStack()
    holders = Holder(), Holder()
    claim_optimizer(optimizer, Technique.COMPILE, holders[0], first)
    claim_optimizer(optimizer, Technique.EVA, holders[1], second)
    claim_model(model, Technique.COMPILE, holders[0], first)
    claim_model(model, Technique.EVA, holders[1], second)
    first.close()
    assert {claim.technique for claim in (*claims_on(optimizer), *claims_on(model))} == {Technique.EVA}
    second.close()
    assert not claims_on(optimizer)


def test_a_state_dict_is_as_without_claims(model, optimizer):
    with ExitStack() as undo:
        holder = Holder()
        claim_model(model, Technique.PIPELINE, holder, undo, detail="a part")
        claim_optimizer(optimizer, Technique.PIPELINE, holder, undo)
        assert list(model.state_dict()) == ["0.weight", "0.bias", "1.1.weight", "1.1.bias"]
        assert set(optimizer.state_dict()) == {"state", "param_groups"}
        model.load_state_dict(model.state_dict())
        assert pipeline_part(model[0]) == "a part"
    assert pipeline_part(model) is None
