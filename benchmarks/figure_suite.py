"""The suite's tables: our steps on one GPU against the fastest of stock ones."""

from __future__ import annotations

import ast
from pathlib import Path

from figures import NONE, Results, Row, geometric_mean, interval, span, table

SUITE, START = "suite-h200.csv", "suite-start-h200.csv"
AGAIN = " (again)"
NOTES = {
    ("llama-12x768-4x1024", "b35c14d"): (
        "Measured before integers that index were kept from having sizes of their own (commit d6cf541), which broke "
        "its graph up. At 877aa76 the step took 10.55 ms, 0.995 [0.972, 1.006] of `graph_compile`'s 10.51, by what was "
        "printed of a run that was cut off before its row was kept"
    ),
}
"""What is known of a model's row as of a commit; it goes when the row is measured again."""


def suite_models() -> list[str]:
    """Read the names of the suite's models from its source, which needs packages that are not everywhere."""
    source = ast.parse(Path(__file__).with_name("suite_models.py").read_text())
    lists = [node.value for node in source.body if isinstance(node, ast.Assign) and _names(node) == ["_SUITE"]]
    return [call.args[0].value for call in lists[0].elts]  # type: ignore[attr-defined]


def _names(node: ast.Assign) -> list[str]:
    return [target.id for target in node.targets if isinstance(target, ast.Name)]


def measured(results: Results) -> dict[str, dict[str, Row]]:
    """Read the suite: rows by model and variant, of the models that have been measured."""
    rows: dict[str, dict[str, Row]] = {}
    for row in results.rows(SUITE):
        rows.setdefault(row["model"], {})[row["variant"]] = row
    return rows


def suite_ratios(results: Results, variant: str) -> dict[str, float]:
    """Read how many times as fast as the best stock step a variant is, by model."""
    ratios = {model: rows[variant]["ratio"] for model, rows in measured(results).items() if variant in rows}
    return {model: float(ratio) for model, ratio in ratios.items() if ratio}


def suite_table(results: Results) -> str:
    known = measured(results)
    notes: list[str] = []
    rows = [_suite_row(model, known.get(model), notes) for model in suite_models()]
    header = (
        "model", "best stock step", "ms", "the same again", "`compile()`, ms", "times as fast",
        "eager stock, `fuse()`", "peak MiB allocated, stock and ours", "reserved", "loss within", "",
    )  # fmt: skip
    ratios = suite_ratios(results, "gradweave.compile")
    noted = {model for model, rows in known.items() if _note(model, rows)}
    text = f"\nGeometric mean of `compile()`: **{geometric_mean(list(ratios.values())):.3f}** ({_of_suite(ratios)})"
    others = [ratio for model, ratio in ratios.items() if model not in noted]
    if noted:
        text += f"; {geometric_mean(others):.3f} ({len(others)}) without the row{'s' * (len(noted) > 1)} with a note"
    text += f". Our steps range from {span(ratios.values(), 3)}.\n"
    lines = "".join(f"{number}. {note}.\n" for number, note in enumerate(notes, 1))
    return table(header, rows) + text + (f"\n{lines}" if lines else "")


def _of_suite(ratios: dict[str, float]) -> str:
    return f"{len(ratios)} of {len(suite_models())} models"


def _note(model: str, rows: dict[str, Row]) -> str:
    return NOTES.get((model, rows["gradweave.compile"]["commit"]), "")


def _suite_row(model: str, rows: dict[str, Row] | None, notes: list[str]) -> list[str]:
    if rows is None:
        return [model, *[""] * 9, "not measured yet"]
    ours = rows["gradweave.compile"]
    best = rows.get(ours["stock_best"])
    if best is None:
        return [model, "none works", *[""] * 8, f"{ours['status']}: {ours['reason']}"]
    status = "" if ours["status"] == "works" else f"{ours['status']}: {ours['reason']}"
    if note := _note(model, rows):
        notes.append(note)
        status = f"note {len(notes)}"
    eager, fuse = rows.get("eager"), rows.get("gradweave.fuse")
    return [
        model, f"`{best['variant']}`", f"{float(best['ms_50']):.2f}", _same_again(best, rows),
        f"{float(ours['ms_50']):.2f}" if ours["ms_50"] else NONE,
        interval(ours, "ratio", "ratio_low", "ratio_high") if ours["ratio"] else NONE,
        ", ".join(_ratio(row, digits=2) for row in (eager, fuse)),
        f"{best['peak_allocated_mib']}, {ours['peak_allocated_mib']}",
        f"{best['peak_reserved_mib']}, {ours['peak_reserved_mib']}",
        ours["largest_loss_difference"], status,
    ]  # fmt: skip


def _same_again(best: Row, rows: dict[str, Row]) -> str:
    """Write the ratio of two processes that do the same: the best stock step's, or else those that there are."""
    again = next((row for name, row in rows.items() if name.endswith(AGAIN)), None)
    if again is None:
        return NONE
    variant = again["variant"].removesuffix(AGAIN)
    if variant == best["variant"]:
        return interval(again, "ratio", "ratio_low", "ratio_high")
    return f"{float(rows[variant]['ms_50']) / float(again['ms_50']):.3f} (of `{variant}`)"


OTHER_STOCK = ("compile_reduce_overhead", "compile_max_autotune", "graph_compile", "graph_max_autotune", "whole", "jax")


def stock_table(results: Results) -> str:
    """Write what the stock steps are to the fastest of them, of the models that have been measured."""
    known = measured(results)
    rows = [
        [model, *(_ratio(known[model].get(name), digits=3) for name in OTHER_STOCK)]
        for model in suite_models()
        if model in known
    ]
    return table(("model", *(f"`{name}`" for name in OTHER_STOCK)), rows)


def _ratio(row: Row | None, *, digits: int) -> str:
    return f"{float(row['ratio']):.{digits}f}" if row and row["ratio"] else NONE


START_VARIANTS = ("eager", "compile_reduce_overhead", "compile_max_autotune", "whole", "gradweave.compile")
COMPARED_STARTS = ("gradweave.compile", "compile_reduce_overhead")


def start_table(results: Results) -> str:
    warm = measured(results)
    cold = {(row["model"], row["variant"]): row for row in results.rows(START)}
    slower: dict[str, list[float]] = {"cold": [], "warm": []}
    rows = []
    for model in suite_models():
        seconds = {}
        for variant in START_VARIANTS:
            row = cold.get((model, variant))
            first = row["cold_s"] if row and row["status"] == "works" else row["status"] if row else NONE
            seconds[variant] = first, _warm_seconds(warm.get(model, {}).get(variant))
        for which, one in zip(slower, zip(*(seconds[name] for name in COMPARED_STARTS), strict=True), strict=True):
            if all(text[0].isdigit() for text in one):
                slower[which].append(float(one[0]) / float(one[1]))
        rows.append([model, *(NONE if pair == (NONE, NONE) else ", ".join(pair) for pair in seconds.values())])
    header = ["seconds, cold and warm", *(f"`{name.removeprefix('gradweave.')}`" for name in START_VARIANTS)]
    words = " and ".join(f"{span(ratios, 1)} times ({which})" for which, ratios in slower.items())
    return table(header, rows) + f"\n`compile()` takes {words} the seconds of `reduce-overhead`.\n"


def _warm_seconds(row: Row | None) -> str:
    """Read the seconds of a warm start: of a step without caches, or one that a cold start has left them for."""
    is_warm = row and (row["cold_s"] or row["variant"] == "eager")
    return row["warm_s"] if row and is_warm else NONE


def compile_span(results: Results) -> str:
    """Say in a few words what the suite says of ``compile()``."""
    ratios = suite_ratios(results, "gradweave.compile")
    known = measured(results)
    noted = [model for model in ratios if _note(model, known[model])]
    others = [ratio for model, ratio in ratios.items() if model not in noted]
    words = (
        f"{span(others)}, geometric mean {geometric_mean(others):.2f} ({len(others)} of {len(suite_models())} models)"
    )
    eager = suite_ratios(results, "eager")
    words += f", which is {span(ratios[model] / eager[model] for model in ratios if model in eager)} over eager steps"
    for model in noted:
        words += f"; {model} {ratios[model]:.2f}, before a defect was fixed"
    return words
