"""Docstrings begin with a verb, and sentences have subjects: what a reader would stumble over is found by its words."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import gradweave

ROOT = Path(gradweave.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
OPENINGS = frozenset(
    re.findall(
        r"\w+",
        "A All An As Both By Context Gives Has How It Keeps Lets Makes Of Raises Returns Says Takes Tells That The "
        "This Those What Where Whether Which Who",
    )
)
"""Words that begin a noun phrase or a report; a function's docstring says what it does: "Return whether ..."."""
VAGUE = re.compile(r"\b(whoever|nobody|somebody|anybody|anew|mended)\b", re.IGNORECASE)


def functions(path: Path) -> Iterator[tuple[str, str]]:
    """Each function that is no property, with the first line of its docstring."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        said = ast.get_docstring(node)
        decorators = {ast.unparse(one).rpartition(".")[2] for one in node.decorator_list}
        if said and not decorators & {"property", "cached_property", "setter"}:
            yield f"{node.name}, line {node.lineno}", said.splitlines()[0]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_function_says_what_it_does(path):
    wrong = {name: line for name, line in functions(path) if line.split()[0] in OPENINGS}
    assert not wrong


def test_sentences_have_subjects():
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in FILES
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if VAGUE.search(line)
    ]
    assert not found, "\n".join(found)
