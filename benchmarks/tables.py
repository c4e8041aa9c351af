"""Tables of results: CSVs that several runs append to."""

from __future__ import annotations

import csv
from pathlib import Path

FIELDS = (
    "case", "model", "optimizer", "batch", "dtype", "max_norm", "mode", "ms_20", "ms_50", "ms_80", "forward_ms",
    "backward_ms", "update_ms", "speedup", "speedup_low", "speedup_high", "same_low", "same_high", "claim", "identical",
    "largest_difference", "peak_bytes", "chosen", "gradweave", "torch", "python", "device", "date",
)  # fmt: skip
"""The first columns, in this order, of those that a table has."""


def read(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def append(path: Path, rows: list[dict[str, object]]) -> None:
    is_new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    fields = fields_of(rows)
    if not is_new:
        with path.open(newline="") as file:
            if fields != next(csv.reader(file), None):
                raise SystemExit(f"{path} has other columns: give another file")
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, fields)
        if is_new:
            writer.writeheader()
        writer.writerows(rows)


def fields_of(rows: list[dict[str, object]]) -> list[str]:
    return [field for field in FIELDS if field in rows[0]] + [field for field in rows[0] if field not in FIELDS]
