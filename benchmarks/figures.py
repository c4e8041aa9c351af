"""Tables of README, docs and benchmarks/README.md, made from the results.

    python benchmarks/figures.py            # write them
    python benchmarks/figures.py --check    # say what differs, and exit with 1

A table lies between ``<!-- figures: NAME -->`` and ``<!-- end -->``; ``figure_tables.py`` makes what is in it.
Needs no torch.
"""

from __future__ import annotations

import argparse
import csv
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"(<!-- figures: ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
NONE = "\N{EN DASH}"
Row = Mapping[str, str]
Tables = Mapping[str, Callable[["Results"], str]]


class Results:
    """The folder of results, as rows of its CSVs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / "benchmarks" / "results"

    def rows(self, name: str, **which: str) -> list[Row]:
        """Read the rows of one CSV, or those that have these values."""
        with (self.folder / name).open(newline="") as file:
            return [row for row in csv.DictReader(file) if all(row[key] == value for key, value in which.items())]

    def row(self, name: str, **which: str) -> Row:
        """Read the one row that has these values."""
        found = self.rows(name, **which)
        if len(found) != 1:
            raise LookupError(f"{name} has {len(found)} rows with {which}; a table needs one")
        return found[0]

    def names(self) -> set[str]:
        return {path.name for path in self.folder.iterdir()}

    def of_column(self, name: str, column: str) -> list[str]:
        """Collect what a CSV has in a column, each value once; nothing where it has no such column."""
        if not name.endswith(".csv"):
            return []
        return sorted({row[column] for row in self.rows(name) if row.get(column)})


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def interval(row: Row, value: str, low: str, high: str, digits: int = 3) -> str:
    """Write a ratio with its interval."""
    return f"{float(row[value]):.{digits}f} [{float(row[low]):.{digits}f}, {float(row[high]):.{digits}f}]"


def span(values: Iterable[float], digits: int = 2) -> str:
    """Write the least and the greatest of some ratios."""
    found = sorted(values)
    return f"{found[0]:.{digits}f} to {found[-1]:.{digits}f}"


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def pages(root: Path) -> list[Path]:
    return [root / "README.md", *sorted((root / "docs").glob("*.md")), root / "benchmarks" / "README.md"]


def generate(root: Path, tables: Tables) -> dict[Path, str]:
    """Make the pages as they should be, with every table made anew from the results."""
    results = Results(root)
    used: set[str] = set()

    def renew(match: re.Match[str]) -> str:
        name = match[2]
        if name not in tables:
            raise LookupError(f"no table is called {name!r}; figure_tables.py has {', '.join(sorted(tables))}")
        used.add(name)
        return f"{match[1]}{tables[name](results)}{match[4]}"

    texts = {page: BLOCK.sub(renew, page.read_text()) for page in pages(root)}
    if unused := set(tables) - used:
        raise LookupError(f"no page has a place for the tables {', '.join(sorted(unused))}")
    return texts


def outdated(root: Path, tables: Tables) -> list[Path]:
    """List the pages that say something else than the results."""
    return [page for page, text in generate(root, tables).items() if page.read_text() != text]


def main() -> None:
    from figure_tables import TABLES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    pages_now = outdated(ROOT, TABLES)
    if options.check and pages_now:
        names = ", ".join(str(page.relative_to(ROOT)) for page in pages_now)
        sys.exit(f"{names}: not what the results say; run `make figures`")
    for page, text in generate(ROOT, TABLES).items():
        page.write_text(text)


if __name__ == "__main__":
    main()
