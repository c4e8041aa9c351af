import random
import types

import pytest
import torch

from gradweave.compiler import snapshot as module
from gradweave.compiler.snapshot import IncomparableError, globals_read_by, snapshot

FACTOR = [1.0]


class Slots:
    __slots__ = ("inner",)

    def __init__(self):
        self.inner = [1]


def reads_a_global():
    return FACTOR


def closure_over(value):
    return lambda: value


VALUES = {
    "list": ([1, [2]], lambda x: x[1].append(3)),
    "dict": ({"a": {"b": 1}}, lambda x: x["a"].update(b=2)),
    "set": ({1}, lambda x: x.add(2)),
    "object": (types.SimpleNamespace(scales=[1.0]), lambda x: x.scales.append(1.0)),
    "slots": (Slots(), lambda x: x.inner.append(2)),
    "generator": (random.Random(0), lambda x: x.random()),
    "bound method": ([1].append, lambda x: x(2)),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_change_in_place_is_seen(name):
    value, change = VALUES[name]
    before = snapshot(value)
    assert snapshot(value) == before
    change(value)
    assert snapshot(value) != before


def test_functions_are_compared_by_what_they_read():
    inner = [1]
    function = closure_over(inner)
    before, other = snapshot(function), snapshot(reads_a_global)
    inner.append(2)
    assert snapshot(function) != before
    FACTOR.append(2.0)
    try:
        assert snapshot(reads_a_global) != other
    finally:
        FACTOR.pop()
    assert snapshot(reads_a_global) == other
    assert globals_read_by(reads_a_global.__code__) == ("FACTOR",)


def test_types_and_numbers_are_told_apart():
    assert snapshot(1) != snapshot(True)
    assert snapshot(1) != snapshot(1.0)
    assert snapshot(float("nan")) == snapshot(float("nan"))
    assert snapshot([1]) != snapshot((1,))


def test_a_value_that_holds_itself_has_a_snapshot():
    value = [1]
    value.append(value)
    assert snapshot(value) == snapshot(value)


@pytest.mark.parametrize("value", [torch.ones(1), [torch.ones(1)], {"a": torch.nn.Linear(1, 1)}])
def test_tensors_and_modules_are_refused(value):
    with pytest.raises(IncomparableError):
        snapshot(value)


def test_known_objects_stand_for_themselves_and_generators_are_collected():
    owner = types.SimpleNamespace(weight=torch.ones(1))
    assert snapshot([owner], {id(owner): "the owner"}) == snapshot([owner], {id(owner): "the owner"})
    own, found = random.Random(0), []
    snapshot({"a": [own]}, generators=found)
    assert found == [own]


def test_too_many_parts_are_refused(monkeypatch):
    monkeypatch.setattr(module, "MOST_PARTS", 10)
    with pytest.raises(IncomparableError, match="too many parts"):
        snapshot([[] for _ in range(20)])
