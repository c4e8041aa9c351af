"""The tables of README and docs, made of results."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from pathlib import Path

from claims import CLAIMS, RECORDS, Claim
from figures import Results, Row, geometric_mean, interval, span, table

NONE = "\N{EN DASH}"

# --- the suite

SUITE, START = "suite-h200.csv", "suite-start-h200.csv"
AGAIN = " (again)"
NOTES = {
    ("llama-12x768-4x1024", "b35c14d"): (
        "Measured before integers that index were kept from having sizes of their own (commit d6cf541), which broke "
        "its graph up; not measured again yet"
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
        "eager stock, `fuse()`", "peak MiB allocated", "reserved", "loss within", "",
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
    best = rows[ours["stock_best"]]
    status = "" if ours["status"] == "works" else f"{ours['status']}: {ours['reason']}"
    if note := _note(model, rows):
        notes.append(note)
        status = f"note {len(notes)}"
    eager, fuse = rows.get("eager"), rows.get("gradweave.fuse")
    return [
        model, f"`{best['variant']}`", f"{float(best['ms_50']):.2f}", _same_again(best, rows),
        f"{float(ours['ms_50']):.2f}" if ours["ms_50"] else NONE,
        interval(ours, "ratio", "ratio_low", "ratio_high") if ours["ratio"] else NONE,
        ", ".join(f"{float(row['ratio']):.2f}" if row and row["ratio"] else NONE for row in (eager, fuse)),
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
            seconds[variant] = first, warm.get(model, {}).get(variant, {}).get("warm_s") or NONE
        for which, one in zip(slower, zip(*(seconds[name] for name in COMPARED_STARTS), strict=True), strict=True):
            if all(text[0].isdigit() for text in one):
                slower[which].append(float(one[0]) / float(one[1]))
        rows.append([model, *(NONE if pair == (NONE, NONE) else ", ".join(pair) for pair in seconds.values())])
    header = ["seconds, cold and warm", *(f"`{name.removeprefix('gradweave.')}`" for name in START_VARIANTS)]
    words = " and ".join(f"{span(ratios, 1)} times ({which})" for which, ratios in slower.items())
    return table(header, rows) + f"\n`compile()` takes {words} the seconds of `reduce-overhead`.\n"


# --- claims


def claims_table(results: Results) -> str:
    """Write what README and docs claim, by page."""
    return table(("claim", "results", "command", "measured", "commit"), _claim_rows(CLAIMS, results, "python "))


def records_table(results: Results) -> str:
    return table(("what for", "results", "made by", "measured", "commit"), _claim_rows(RECORDS, results, ""))


def _claim_rows(claims: Iterable[Claim], results: Results, before: str) -> Iterable[list[str]]:
    for claim in claims:
        command = f"`{claim.command}`" if before else claim.command
        page = Path(claim.page).name
        yield [
            f"[{page}](../{claim.page}): {claim.says}",
            ", ".join(f"[{name}](results/{name})" for name in claim.files),
            command, _dates(claim, results), _commits(claim, results),
        ]  # fmt: skip


def _dates(claim: Claim, results: Results) -> str:
    dates = sorted({date for name in claim.files for date in results.of_column(name, "date")}) or [claim.date]
    return dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"


def _commits(claim: Claim, results: Results) -> str:
    measured_at = sorted({commit for name in claim.files for commit in results.of_column(name, "commit")})
    return ", ".join(measured_at) if measured_at else f"with {claim.commit}"


# --- compile()

CASES = {
    "gpt2-2x1024": "GPT-2 (163M), 2 x 1024, AdamW",
    "gpt2-8x1024": "the same, 8 x 1024",
    "mobilenet_v2-32": "MobileNetV2, batch 32, AdamW",
    "resnet50-32": "ResNet-50, batch 32, SGD",
}


def whole_step_table(results: Results) -> str:
    rows = []
    for case, name in CASES.items():
        ms = {row["mode"]: float(row["ms_50"]) for row in results.rows("whole-step-h200.csv", case=case)}
        floors = results.row("whole-step-h200.csv", case=case, mode="step")
        jax = f"{ms['jax']:.2f}" if "jax" in ms else NONE
        rows.append([
            name, jax, f"{ms['step']:.2f}", f"{ms['jax'] / ms['step']:.2f}" if "jax" in ms else NONE,
            f"{ms['step_clip']:.2f}", f"{float(floors['flops_floor_ms']):.2f}, {float(floors['update_floor_ms']):.2f}",
        ])  # fmt: skip
    return table(
        ("ms", "JAX", "`compile()`", "times as fast as JAX", "with clipping", "floor: arithmetic, update"), rows
    )


# --- which page has which table

TABLES: dict[str, Callable[[Results], str]] = {
    "claims": claims_table,
    "records": records_table,
    "suite": suite_table,
    "suite-start": start_table,
    "whole-step": whole_step_table,
}
