# mypy: ignore-errors
"""Shared by all Triton modules: constants for kernels, and tables of addresses on the device."""

from collections import namedtuple

import triton
import triton.language as tl


class Constants(tl.constexpr):
    """A named tuple whose fields kernels may read: ``FLOAT32.eps``.

    Triton lets kernels read globals only if they are ``constexpr``. It writes their representation, with all values,
    into the key of its cache; and at every launch it compares each of them with a deep copy from when the kernel was
    compiled. A ``constexpr`` for each number would cost about half a microsecond of every launch. There is one of these
    objects for a set of numbers; they are their own copies, and compared by identity.

    Args:
        value: The named tuple.
    """

    def __init__(self, value):
        super().__init__(value)
        # Triton's compiler reads fields of the value; its interpreter, which is plain Python, those of this object.
        vars(self).update(value._asdict())

    def __deepcopy__(self, _):
        return self

    def __eq__(self, other):
        return self is other

    def __ne__(self, other):
        return self is not other

    __hash__ = object.__hash__


def columns_of(row):
    """Return the number of each column of a table, by the names of its rows' fields, and the table's ``width``.

    Args:
        row: The class of the rows, a ``NamedTuple``.
    """
    names = (*row._fields, "width")
    return Constants(namedtuple(row.__name__, names)(*range(len(names))))


@triton.jit
def load_pointer(addresses, index):
    """Return a pointer to the float32 tensor whose address is in a table."""
    return tl.load(addresses + index).to(tl.pointer_type(tl.float32))


# None of the arguments is specialized on: otherwise Triton would compile this again for every pattern of addresses that
# are multiples of 16.
@triton.jit(do_not_specialize=["start", *(f"n{number}" for number in range(32))])
def write_addresses(
    table, start: tl.int64,
    n0: tl.int64, n1: tl.int64, n2: tl.int64, n3: tl.int64, n4: tl.int64, n5: tl.int64, n6: tl.int64,
    n7: tl.int64, n8: tl.int64, n9: tl.int64, n10: tl.int64, n11: tl.int64, n12: tl.int64, n13: tl.int64,
    n14: tl.int64, n15: tl.int64, n16: tl.int64, n17: tl.int64, n18: tl.int64, n19: tl.int64, n20: tl.int64,
    n21: tl.int64, n22: tl.int64, n23: tl.int64, n24: tl.int64, n25: tl.int64, n26: tl.int64, n27: tl.int64,
    n28: tl.int64, n29: tl.int64, n30: tl.int64, n31: tl.int64,
):  # fmt: skip
    """Write 32 addresses, which travel as arguments: nothing waits, and a captured graph replays them."""
    table += start
    tl.store(table + 0, n0)
    tl.store(table + 1, n1)
    tl.store(table + 2, n2)
    tl.store(table + 3, n3)
    tl.store(table + 4, n4)
    tl.store(table + 5, n5)
    tl.store(table + 6, n6)
    tl.store(table + 7, n7)
    tl.store(table + 8, n8)
    tl.store(table + 9, n9)
    tl.store(table + 10, n10)
    tl.store(table + 11, n11)
    tl.store(table + 12, n12)
    tl.store(table + 13, n13)
    tl.store(table + 14, n14)
    tl.store(table + 15, n15)
    tl.store(table + 16, n16)
    tl.store(table + 17, n17)
    tl.store(table + 18, n18)
    tl.store(table + 19, n19)
    tl.store(table + 20, n20)
    tl.store(table + 21, n21)
    tl.store(table + 22, n22)
    tl.store(table + 23, n23)
    tl.store(table + 24, n24)
    tl.store(table + 25, n25)
    tl.store(table + 26, n26)
    tl.store(table + 27, n27)
    tl.store(table + 28, n28)
    tl.store(table + 29, n29)
    tl.store(table + 30, n30)
    tl.store(table + 31, n31)
