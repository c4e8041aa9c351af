"""Write docs/composition.md from the tables of what composes and from the tests of their cells.

PYTHONPATH=src:tests python3 tools/composition_docs.py
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import get_args

from _runtime import composition_tests
from gradweave._runtime.claims import Technique
from gradweave._runtime.composition import COMPOSITION, WITH_TORCH, Column, Rule, Verdict

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "composition.md"
INTRODUCTION = """# What works together

The row is attached first, the column next. ✓ works; ◐ works under the condition of its note; ✗ raises, before
anything is changed unless its note says otherwise; - is not provided. Every cell has tests, named further below.

This page is made by `tools/composition_docs.py` from the table that the library itself refuses by
(`src/gradweave/_runtime/composition.py`).
"""


def files_of_tests() -> dict[str, list[Path]]:
    """Return the files that define a test, by its name."""
    found: dict[str, list[Path]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for name in re.findall(r"^\s*(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE):
            found.setdefault(name, []).append(path.relative_to(ROOT))
    return found


def link(test: str, files: dict[str, list[Path]]) -> str:
    """Return a test, given as ``folder::name``, with its file; raise LookupError if there is none."""
    folder, _, name = test.partition("::")
    paths = [path for path in files.get(name, []) if path.is_relative_to(Path("tests") / folder)]
    if not paths or (not folder and len(paths) > 1):
        raise LookupError(f"{name} is in {len(paths)} files of tests/{folder}")
    return f"[`{name}`](../{paths[0]})"


def table(corner: str, columns: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]]) -> str:
    """Return a table of Markdown."""
    lines = [f"| {corner} | {' | '.join(columns)} |", f"|{' --- |' * (len(columns) + 1)}"]
    return "\n".join([*lines, *(f"| {name} | {' | '.join(cells)} |" for name, cells in rows)])


def matrix(corner: str, columns: Sequence[str], rules: dict[str, Sequence[Rule]]) -> str:
    """Return a matrix of signs, and the notes that its cells refer to."""
    notes: dict[str, int] = {}
    for own in rules.values():
        for rule in own:
            if told(rule):
                notes.setdefault(told(rule), len(notes) + 1)

    def cell(rule: Rule) -> str:
        return rule.verdict.value + (f" <sup>{notes[told(rule)]}</sup>" if told(rule) else "")

    made = table(corner, columns, [(name, [cell(rule) for rule in own]) for name, own in rules.items()])
    return f"{made}\n\n" + "\n".join(f"{number}. {note}" for note, number in notes.items())


def told(rule: Rule) -> str:
    """Return what a note says of a cell: its condition, or why it is refused."""
    return rule.note or (rule.reason if rule.verdict is Verdict.REFUSED else "")


def page() -> str:
    """Return the whole page."""
    files = files_of_tests()
    own = {f"`{held}`": [COMPOSITION[held, newcomer] for newcomer in Technique] for held in Technique}
    other = {name: [rules[column] for column in get_args(Column)] for name, rules in WITH_TORCH.items()}
    tested = [
        (f"`{held}`, then `{newcomer}`", [", ".join(link(test, files) for test in tests)])
        for (held, newcomer), tests in composition_tests.OWN.items()
    ]
    tested_with_torch = [
        (f"{name}, `{column}`", [", ".join(link(test, files) for test in tests)])
        for name, cells in composition_tests.WITH_TORCH.items()
        for column, tests in cells.items()
        if tests
    ]
    parts = [
        INTRODUCTION,
        "## Techniques\n",
        matrix("first \\ next", [f"`{newcomer}`" for newcomer in Technique], own) + "\n",
        "`Eva` stands for `Eva`, `EvaF` and `EvaS`.\n",
        "## With torch, Accelerate and Lightning\n",
        matrix("", [f"`{column}`" for column in get_args(Column)], other) + "\n",
        "## Tests of techniques\n",
        table("cell", ["tests"], tested) + "\n",
        "## Tests with torch, Accelerate and Lightning\n",
        table("cell", ["tests"], tested_with_torch),
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
