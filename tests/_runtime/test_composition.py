"""The table of what composes is whole, every cell has its tests, and the docs say what it says."""

import sys
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import nn

from _runtime import composition_tests
from gradweave._runtime.claims import Technique, claim_model, claim_optimizer
from gradweave._runtime.composition import COMPOSITION, WITH_TORCH, Column, Verdict, refuse_conflicts
from gradweave.errors import UnsupportedError

ROOT = Path(__file__).parents[2]
PAIRS = list(product(Technique, repeat=2))


@pytest.fixture(scope="module")
def docs():
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import composition_docs
    finally:
        sys.path.pop(0)
    return composition_docs


def test_every_pair_has_a_rule_and_a_test_in_both_orders():
    assert set(COMPOSITION) == set(composition_tests.OWN) == set(PAIRS)
    assert all(composition_tests.OWN[pair] for pair in PAIRS)


def test_everything_around_a_loop_has_a_rule_and_a_test_for_every_technique():
    assert list(WITH_TORCH) == list(composition_tests.WITH_TORCH)
    for name, rules in WITH_TORCH.items():
        tests = composition_tests.WITH_TORCH[name]
        assert list(rules) == list(tests) == list(get_args(Column))
        for column, rule in rules.items():
            assert bool(tests[column]) == (rule.verdict is not Verdict.NOT_PROVIDED), (name, column)


def test_the_tests_that_are_named_exist(docs):
    files = docs.files_of_tests()
    named = [test for tests in composition_tests.OWN.values() for test in tests]
    named += [test for cells in composition_tests.WITH_TORCH.values() for tests in cells.values() for test in tests]
    for test in named:
        assert docs.link(test, files)


def test_the_docs_are_made_from_the_table(docs):
    assert docs.PAGE.read_text() == docs.page(), "run: PYTHONPATH=src:tests python3 tools/composition_docs.py"


class Holder:
    """Stands for an attachment."""


@pytest.mark.parametrize(("held", "newcomer"), PAIRS)
def test_a_refusal_names_who_asks_why_and_what_to_do(held, newcomer):
    rule = COMPOSITION[held, newcomer]
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    refuse_conflicts(newcomer, model=model, optimizer=optimizer)
    if rule.verdict is not Verdict.REFUSED or not rule.reason:
        return
    for place in ("model", "optimizer"):
        with ExitStack() as undo:
            holder = Holder()
            if place == "model":
                claim_model(model, held, holder, undo)
            else:
                claim_optimizer(optimizer, held, holder, undo)
            if rule.on in (place, "either"):
                with pytest.raises(UnsupportedError) as refused:
                    refuse_conflicts(newcomer, model=nn.Sequential(model), optimizer=optimizer)
                assert str(newcomer) in refused.value.subject
                assert refused.value.reason == f"it {rule.reason}"
                assert refused.value.remedy
            else:
                refuse_conflicts(newcomer, model=model, optimizer=optimizer)
    refuse_conflicts(newcomer, model=model, optimizer=optimizer)
