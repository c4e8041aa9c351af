"""Imports point downwards, private names stay at home, and torch's private names stay in ``_compat``.

Every import statement counts: those inside functions and those under ``TYPE_CHECKING`` too. The tables of exceptions
can only shrink: an entry that the tree no longer needs fails its test.
"""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import gradweave

ROOT = Path(gradweave.__file__).parent

LAYERS = (
    {"errors"},
    {"_logging", "schedule"},
    {"_compat"},
    {"_runtime"},
    {"step_graph"},
    {"profile"},
    {
        "compiler",
        "fusion",
        "optim",
        "parallel.daso",
        "parallel.data_parallel",
        "parallel.pipeline",
        "reordering",
    },
    {"gradweave"},
    {"compare"},
    {"cli"},
    {"__main__"},
)
"""Bottom to top. A package imports from lower layers only; ``gradweave`` is the front door, ``__init__.py``."""

UPWARD_OR_SIDEWAYS: dict[tuple[str, str], str] = {}
"""Importing module and imported package, with the reason; both below ``gradweave``."""

PRIVATE_TORCH: dict[tuple[str, str], str] = {}
"""Module and private name of torch outside of ``_compat``, with the reason."""

_NOT_PRIVATE = {"_asdict", "_exit", "_getframe", "_fields", "_replace"}
"""Documented names of the standard library in spite of their underscore."""


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of the package by its name below ``gradweave``."""
    parsed = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        parsed[name or "gradweave"] = ast.parse(path.read_text())
    return parsed


def package_of(module: str) -> str:
    first, *rest = module.split(".")
    return f"{first}.{rest[0]}" if first == "parallel" and rest else first


def imports(module: str) -> Iterator[tuple[str, list[str]]]:
    """Each imported module by its full name, with the names taken from it."""
    for node in ast.walk(modules()[module]):
        if isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}: relative import of {node.module}"
            yield node.module, [alias.name for alias in node.names]


def own_imports(module: str) -> Iterator[tuple[str, list[str]]]:
    """Imports from gradweave by the name below it; ``from package import x`` may import a module ``x``."""
    for imported, names in imports(module):
        root, _, below = imported.partition(".")
        if root != "gradweave":
            continue
        full = {name: f"{below}.{name}" if below else name for name in names}
        submodules = [name for name in names if full[name] in modules()]
        yield from ((full[name], [name]) for name in submodules)
        others = [name for name in names if name not in submodules]
        if others or (below and not names):
            yield below or "gradweave", others


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def assert_only(found: set, allowed: dict, what: str):
    new, gone = sorted(found - allowed.keys()), sorted(allowed.keys() - found)
    assert not new, f"{what}, without a place in the table of exceptions: {new}"
    assert not gone, f"exceptions that are no longer needed, to be taken out of the table: {gone}"


def test_every_package_has_a_layer():
    packages = {package_of(module) for module in modules()} - {"parallel"}
    assert packages == set().union(*LAYERS)


def test_packages_import_from_lower_layers_only():
    layer_of = {package: number for number, layer in enumerate(LAYERS) for package in layer}
    found = set()
    for module in modules().keys() - {"parallel"}:
        package = package_of(module)
        for imported, names in own_imports(module):
            target = package_of(imported)
            if target == "gradweave" and names == ["__version__"]:
                continue
            if target != package and layer_of[target] >= layer_of[package]:
                found.add((module, target))
    assert_only(found, UPWARD_OR_SIDEWAYS, "imports upwards or sideways")


def test_only_the_command_line_imports_the_comparison():
    importers = {
        package_of(m) for m in modules() for imported, _ in own_imports(m) if package_of(imported) == "compare"
    }
    assert importers == {"compare", "cli"}


def test_schedules_need_the_standard_library_and_matplotlib_only():
    for module in modules():
        if package_of(module) != "schedule":
            continue
        for imported, _ in imports(module):
            root = imported.partition(".")[0]
            assert root in {*sys.stdlib_module_names, "matplotlib", "gradweave"}, (module, imported)
        assert {package_of(imported) for imported, _ in own_imports(module)} <= {"schedule", "errors"}, module


KNOTS = {
    ("optim.kernels.gpu_statistics", "optim.statistics.hooks"): "the type of the hooks that it serves",
    ("schedule.timeline", "schedule.output"): "Timeline.save(), a convenience of the class that is written",
}
"""Imports within a package that close a cycle of files, with the reason."""


def test_the_files_of_a_package_import_each_other_without_a_cycle():
    """Neither a function's own import nor ``TYPE_CHECKING`` hides a cycle here."""
    needs = {
        module: {imported for imported, _ in own_imports(module) if package_of(imported) == package_of(module)}
        for module in modules()
    }
    for module, imported in KNOTS:
        assert imported in needs[module], f"no longer a knot: take {(module, imported)} out of the table"
        needs[module].remove(imported)
    while free := [module for module, needed in needs.items() if not needed & needs.keys()]:
        for module in free:
            del needs[module]
    assert not needs


def test_no_private_name_is_imported_from_another_package():
    found = {
        (module, imported, name)
        for module in modules()
        for imported, names in own_imports(module)
        for name in names
        if is_private(name) and name not in modules() and package_of(imported) != package_of(module)
    }
    assert not found


@pytest.fixture(scope="module")
def own_names() -> set[str]:
    """Every name that gradweave gives to a function, a class, a variable or an attribute."""
    own = set()
    for tree in modules().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                own.add(node.attr)
    return own - {"_version", "_schema", "_parameters"}


def test_private_names_of_torch_are_used_in_compat_only(own_names):
    """An underscore attribute that gradweave does not define is taken for one of torch."""
    found = set()
    for module, tree in modules().items():
        if package_of(module) == "_compat":
            continue
        for imported, names in imports(module):
            if imported.partition(".")[0] == "torch":
                found |= {(module, name) for name in (*imported.split("."), *names) if is_private(name)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and is_private(node.attr):
                of_torch = ast.unparse(node.value).partition(".")[0] == "torch"
                if of_torch or node.attr not in own_names | _NOT_PRIVATE:
                    found.add((module, node.attr))
    assert_only(found, PRIVATE_TORCH, "private names of torch outside of _compat")
