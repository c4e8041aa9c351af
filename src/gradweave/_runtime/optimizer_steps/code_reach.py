"""Global state that an optimizer's code can reach, read from the code before any of it runs."""

from __future__ import annotations

import dis
from collections.abc import Iterable, Iterator
from inspect import unwrap
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

from torch.optim import Optimizer

from gradweave._runtime.optimizer_steps.snapshot import class_data, is_data, is_immutable

_TRUSTED = frozenset(
    (
        "abc", "builtins", "cmath", "collections", "contextlib", "copy", "dataclasses", "enum", "functools", "inspect",
        "itertools", "math", "numbers", "operator", "packaging", "torch", "types", "typing", "typing_extensions",
        "warnings",
    )
)  # fmt: skip
"""Libraries whose functions keep no state that an update could depend on."""
_NUMBERS = (bool, int, float, complex, str, bytes, type(None), type(...))


def find_reach(optimizer: Optimizer) -> str:
    """Return what an optimizer's code uses that a loop may change, or that trial steps would change; empty if nothing.

    A step that reads a global number may find another one when its updates are deferred, and a step that draws from its
    own generator, or counts in a global, would do so in every trial and once for each part. Code that cannot be
    analysed counts as such.
    """
    return next(_faults(optimizer), "")


def is_torchs(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's step is the one of torch's own class."""
    wrappings = [_home_of(function) for function in _unwrapped(type(optimizer).step)]
    return all(module.startswith("torch.optim.") for module in (type(optimizer).__module__, *wrappings))


def _faults(optimizer: Optimizer) -> Iterator[str]:
    seen: set[int] = set()
    for function in _unwrapped(type(optimizer).step):  # patched into a class of torch, perhaps
        yield from _faults_of_function(function, seen)
    for owner in type(optimizer).__mro__:
        if not is_trusted(owner.__module__):
            yield from _faults_of_class(owner, f"the class attribute {owner.__name__}.", seen)
            yield from _reads_past_the_instance(owner, class_data(optimizer).keys())


def _reads_past_the_instance(owner: type, names: Iterable[str]) -> Iterator[str]:
    """Yield reads of the class's data as ``type(self).name`` or ``Class.name``.

    Only ``self.name`` finds the snapshot that a deferred update is given. A name in capitals counts as a constant.
    """
    changing = {name for name in names if not name.isupper()}
    for value in vars(owner).values():
        for function in _functions_of(value):
            if not changing or not isinstance(function := unwrap(function), FunctionType):
                continue
            me = function.__code__.co_varnames[:1]
            for code in nested_code(function.__code__):
                before: Any = None
                for step in dis.get_instructions(code):
                    if (
                        step.opname in ("LOAD_ATTR", "LOAD_METHOD")
                        and step.argval in changing
                        and not _loads(before, me)
                    ):
                        yield (
                            f"reads its class attribute {step.argval!r} other than through self, and it may have "
                            "changed when updates are deferred (keep it in a group)"
                        )
                    before = before if step.opname == "COPY" else step


def _loads(step: Any, names: tuple[str, ...]) -> bool:
    """Return whether the last thing an instruction loads is one of the named local variables."""
    if step is None or not step.opname.startswith(("LOAD_FAST", "LOAD_DEREF")):
        return False
    return (step.argval[-1] if isinstance(step.argval, tuple) else step.argval) in names


def _faults_of_class(owner: type, named: str, seen: set[int]) -> Iterator[str]:
    if id(owner) in seen:
        return
    seen.add(id(owner))
    for name, value in list(vars(owner).items()):
        if name != "__init__" and (callable(value) or not name.startswith("__")):
            for function in _functions_of(value):
                yield from _faults_of_function(function, seen)
            if not _is_code(value) and not is_data(value):
                yield _uses(named + name, value)


def _faults_of_function(function: Any, seen: set[int]) -> Iterator[str]:
    if hasattr(function, "__wrapped__"):
        yield from _faults_of_function(function.__wrapped__, seen)
    if not isinstance(function, FunctionType) or id(function) in seen or is_trusted(_home_of(function)):
        return
    seen.add(id(function))
    for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield from _faults_of_value(f"a default of {function.__name__}()", default, seen, is_constant=True)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if name != "__class__":
            yield from _faults_of_value(f"{name!r} of {function.__name__}()", content_of(cell), seen)
    for code in nested_code(function.__code__):
        for name in _globals_of(code):
            if name in function.__globals__:
                # By convention a name in capitals is a constant.
                value = function.__globals__[name]
                yield from _faults_of_value(f"the global {name!r}", value, seen, is_constant=name.isupper())
            elif name in _REACHES_ANYTHING:
                yield f"calls {name}() in its code, which may use anything"
        for module in _imported_in(code):
            if not is_trusted(module):
                yield f"imports {module} in its code, whose state a loop may change unnoticed"


def _faults_of_value(place: str, value: Any, seen: set[int], *, is_constant: bool = False) -> Iterator[str]:
    if isinstance(value, ModuleType):
        if not is_trusted(value.__name__):
            yield _uses(place, value)
    elif isinstance(value, type):
        if not is_trusted(value.__module__):
            yield from _faults_of_class(value, f"{value.__name__}.", seen)
            numbers = [name for name, kept in vars(value).items() if not name.startswith("__") and is_data(kept)]
            if numbers and not issubclass(value, Optimizer):
                yield _uses(f"{value.__name__}.{numbers[0]}", vars(value)[numbers[0]])
    elif isinstance(value, tuple):
        for item in value:
            yield from _faults_of_value(place, item, seen, is_constant=is_constant)
    elif _is_code(value):
        for function in _functions_of(value):
            yield from _faults_of_function(function, seen)
    elif not (isinstance(value, _NUMBERS) and is_constant) and not is_immutable(value):
        yield _uses(place, value)


def _uses(place: str, value: Any) -> str:
    return (
        f"uses {place} ({type(value).__name__}) in its code, which may have changed when updates are deferred, or "
        "changes each time the code runs (keep it in a group, or in state[p])"
    )


def _functions_of(value: Any) -> Iterable[Any]:
    """Return the functions of an attribute: a property's, a static or class method's, or the attribute itself."""
    if isinstance(value, property):
        return [function for function in (value.fget, value.fset, value.fdel) if function is not None]
    if isinstance(value, (staticmethod, classmethod)):
        return [value.__func__]
    return [value] if callable(value) and hasattr(unwrap(value), "__code__") else []


def _is_code(value: Any) -> bool:
    """Return whether a value is some kind of function, or part of a trusted library."""
    if isinstance(value, (property, staticmethod, classmethod, FunctionType, BuiltinFunctionType)):
        return True
    if callable(value) and isinstance(unwrap(value), FunctionType):
        return True
    kind = type(value)
    return (is_trusted(kind.__module__) and callable(value)) or kind.__module__ == "typing" or is_immutable(value)


def _unwrapped(function: Any) -> Iterator[Any]:
    """Yield a function and, from the outside in, the functions that it wraps."""
    yield function
    while (function := getattr(function, "__wrapped__", None)) is not None:
        yield function


def _home_of(function: Any) -> str:
    """Return the module in which a function was written; ``functools.wraps`` overwrites ``__module__``."""
    if isinstance(function, FunctionType):
        return str(function.__globals__.get("__name__", ""))
    return str(getattr(function, "__module__", ""))


def is_trusted(module: str | None) -> bool:
    """Return whether a module's functions keep no state, and dispatch on the class of tensors."""
    return (module or "").partition(".")[0] in _TRUSTED


def nested_code(code: CodeType) -> Iterator[CodeType]:
    """Yield a function's code and that of the functions defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from nested_code(constant)


def _globals_of(code: CodeType) -> set[str]:
    wanted = {"LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME"}
    return {step.argval for step in dis.get_instructions(code) if step.opname in wanted}


def _imported_in(code: CodeType) -> set[str]:
    return {step.argval for step in dis.get_instructions(code) if step.opname == "IMPORT_NAME"}


def content_of(cell: Any) -> Any:
    """Return the value of a closure's cell; None if it has none yet."""
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


_REACHES_ANYTHING = frozenset({"__import__", "eval", "exec", "globals", "input", "open"})
