"""Constants that kernels may read, such as the numbers of a table's columns."""

import copy
from operator import ne
from typing import NamedTuple

import pytest

pytest.importorskip("triton")

from gradweave.optim.kernels.launch_triton import Constants, columns_of


class Row(NamedTuple):
    rows: int
    columns: int


class Turned(NamedTuple):
    columns: int
    rows: int


def test_columns_are_numbered_in_the_order_of_fields():
    table = columns_of(Row)
    assert (table.rows, table.columns, table.width) == (0, 1, 2)
    assert table.value == (0, 1, 2)


def test_the_key_of_tritons_cache_has_the_numbers():
    """It is made of the representation: kernels in the cache are not used with a schema that has changed."""
    assert "rows=0, columns=1, width=2" in repr(columns_of(Row))
    assert repr(columns_of(Row)) != repr(columns_of(Turned))


def test_constants_are_their_own_copies_and_compared_by_identity():
    """Triton keeps a deep copy of each global that a kernel reads, and compares the two at every launch."""

    class Incomparable(int):
        def __eq__(self, _):
            raise AssertionError("compared by value")

        __ne__ = __eq__
        __hash__ = int.__hash__

    constants = Constants(Row(Incomparable(1), Incomparable(2)))
    assert not ne(copy.deepcopy(constants), constants)
    assert ne(constants, Constants(Row(Incomparable(1), Incomparable(2))))
