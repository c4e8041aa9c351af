"""Triton's interpreter, prepared for tests: import this before any kernel, with TRITON_INTERPRET=1 set."""

import gc
import os
import warnings
from contextlib import contextmanager
from functools import cache
from weakref import ref

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

assert os.environ.get("TRITON_INTERPRET") == "1"

_patched = interpreter._patch_lang_tensor


def _patch_lang_tensor(tensor, scope):
    """As Triton's, and for a numpy that no longer converts arrays of one element to a number by itself."""
    _patched(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_lang_tensor


class _Lasting(interpreter._LangPatchScope):
    """Patches of Triton's language that stay: nothing is compiled in this process."""

    def restore(self):
        pass


_prepared = set()
_patch_lang = interpreter._patch_lang
interpreter._LangPatchScope = _Lasting


def _patch_lang_once(fn):
    """As Triton's, which patches its language again at each launch and each call of a function."""
    languages = frozenset(id(value) for value in fn.__globals__.values() if value is tl or value is tl.core)
    if languages not in _prepared:
        _prepared.add(languages)
        _patch_lang(fn)
    return _Lasting()


interpreter._patch_lang = _patch_lang_once

_get_np_dtype = interpreter._get_np_dtype
_of_scalars = cache(_get_np_dtype)
interpreter._get_np_dtype = lambda kind: (_of_scalars if type(kind) is tl.dtype else _get_np_dtype)(kind)

_set_attr = interpreter.TensorHandle.set_attr


def _set_true_attr(self, name, values):
    """As Triton's, after checking that a hint holds: compiled code that relies on it would read misaligned memory."""
    if name == "tt.divisibility":
        assert (self.data.astype(np.int64) % int(values[0]) == 0).all(), f"{self.data} is no multiple of {values[0]}"
    _set_attr(self, name, values)


interpreter.TensorHandle.set_attr = _set_true_attr


# On a GPU the maximum of a number and NaN is the number, in reductions too.
interpreter.InterpreterBuilder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
interpreter.InterpreterBuilder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)


_create_dot = interpreter.InterpreterBuilder.create_dot


def _create_true_dot(self, a, b, *rest):
    """As Triton's, which takes bfloat16 for its bits, as whole numbers."""

    def wide(x):
        if x.dtype.scalar != tl.bfloat16:
            return x
        numbers = (x.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(numbers, tl.float32)

    return _create_dot(self, wide(a), wide(b), *rest)


interpreter.InterpreterBuilder.create_dot = _create_true_dot


_earlier = []
"""Weak references to the tensors there were when objects were last frozen."""


def _tensors():
    """Return all tensors; a million objects of modules are looked through only once."""
    if not _earlier:
        gc.unfreeze()  # what was frozen before has not been looked through
    objects = gc.get_objects()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        new = [x for x in objects if type(x) in (torch.Tensor, torch.nn.Parameter)]
    found = [*new, *(x for known in _earlier if (x := known()) is not None)]
    if len(objects) > 50_000:
        _earlier[:] = [ref(x) for x in found]
        gc.freeze()
    return found


class _Launch:
    """The memory that the programs of one launch touch."""

    def __init__(self):
        tensors = _tensors()
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
        self.starts = np.array(sorted(storages), dtype=np.int64)
        self.ends = self.starts + np.array([storages[start] for start in self.starts.tolist()])
        self.touched = {"load": [], "store": []}

    def touch(self, what, pointers, mask):
        """Note the addresses that a program reads or writes; all of them must belong to a tensor."""
        size = pointers.get_element_ty().primitive_bitwidth // 8
        addresses = np.broadcast_to(pointers.data, mask.data.shape)[mask.data.astype(bool)].astype(np.int64)
        found = np.searchsorted(self.starts, addresses, side="right") - 1
        assert (addresses + size <= self.ends[found]).all(), f"{what} outside of every tensor"
        self.touched[what].append((interpreter.interpreter_builder.grid_idx[0], addresses.tolist()))

    def check(self, name):
        """Check that no program touches what another one writes: on a GPU they run at once."""
        writers = {}
        for program, addresses in self.touched["store"]:
            for address in addresses:
                assert writers.setdefault(address, program) == program, f"two programs of {name} write one element"
        for program, addresses in self.touched["load"]:
            for address in addresses:
                assert writers.get(address, program) == program, f"a program of {name} reads what another one writes"


@contextmanager
def watched():
    """Context in which kernels may touch nothing but tensors, and programs nothing that others of the launch write."""
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store, run = builder.create_masked_load, builder.create_masked_store, executor.__call__
    launches = []

    def watched_load(self, pointers, mask, *others):
        launches[-1].touch("load", pointers, mask)
        return load(self, pointers, mask, *others)

    def watched_store(self, pointers, value, mask, *others):
        launches[-1].touch("store", pointers, mask)
        return store(self, pointers, value, mask, *others)

    def watched_run(self, *args, **options):
        launches.append(_Launch())
        run(self, *args, **options)
        launches[-1].check(self.fn.__name__)

    builder.create_masked_load, builder.create_masked_store = watched_load, watched_store
    executor.__call__ = watched_run
    try:
        yield launches
    finally:
        builder.create_masked_load, builder.create_masked_store = load, store
        executor.__call__ = run
