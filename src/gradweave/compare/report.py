"""A comparison as one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Sequence
from pathlib import Path

from gradweave._runtime.ab_trial import RULES
from gradweave.compare.comparison import Comparison
from gradweave.compare.results import Result
from gradweave.compare.trial import PARTS

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.verdict { border-left: 4px solid #4477aa; padding: .5rem 1rem; background: #4477aa1a; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { padding: .3rem .6rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } tr { border-bottom: 1px solid #8884; }
img { max-width: 100%; background: white; border-radius: 4px; } code { overflow-wrap: anywhere; }
dt { font-weight: 600; } dd { margin: 0 0 .5rem 1rem; }
"""
_PICTURES = ("Step times", "Training loss", "Measured timelines")


def save_report(comparison: Comparison, pictures: Iterable[Path], path: Path, command: str = "") -> None:
    """Write the report, with its pictures inside.

    Args:
        comparison: The comparison to report.
        pictures: Paths of its pictures, in the order of their headings.
        path: Path of the report.
        command: The command that made it, as typed.
    """
    title = html.escape(comparison.title)
    images = "".join(
        f'<h2>{name}</h2><img alt="{name}" src="data:image/png;base64,{_encoded(picture)}">'
        for name, picture in zip(_PICTURES, pictures, strict=True)
    )
    explained = "".join(
        f"<dt>{html.escape(result.label)}</dt><dd>{html.escape(result.description)}</dd>"
        for result in comparison.results
    )
    facts = ", ".join(f"{html.escape(key)} {html.escape(value)}" for key, value in comparison.environment.items())
    made_by = f"<p><code>{html.escape(command)}</code></p>" if command else ""
    path.write_text(
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>gradweave: {title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>'
        f"<h1>{title}</h1>{made_by}<p class=verdict>{html.escape(comparison.verdict)}</p>"
        f"{_table(comparison.results)}<h2>How to read this</h2>{_legend(comparison)}{images}"
        f"<h2>What each mode did</h2><dl>{explained}</dl><p><small>{facts}</small></p></body></html>\n"
    )


def _legend(comparison: Comparison) -> str:
    """Return an explanation of the columns."""
    steps, baseline = comparison.steps, comparison.results[0].label
    lines = [
        f"Each row is the same training from the same seed, of {steps.total} steps: {steps.settling} to settle, "
        f"{steps.timed} timed (in turn with the other rows) and {steps.recorded} recorded part by part.",
        "ms per step: the median of blocks of steps; 20% to 80%: the percentiles of these blocks.",
        f"speed-up [95%]: against {baseline}, with its 95% interval. Two equal trainings differ too: a second row of "
        f"{baseline} shows by how much.",
        f'training: "same" means that every weight ends bit for bit as with {baseline}; "7e-03 off" is the largest '
        'difference of any weight; "loss" is the largest relative difference of the first losses for modes that take '
        "whole steps, and the last loss for other optimizers.",
        "lr: the learning rate, as given or by default; none was tuned for this comparison.",
    ]
    if any(result.label == "auto" for result in comparison.results):
        lines.append(
            f"auto leaves stock order only for a mode that was at least {1 - RULES.most:.0%} faster in the median, and "
            "faster in every one of its own rounds: a lower median alone does not decide."
        )
    return f"<ul>{''.join(f'<li>{html.escape(line)}</li>' for line in lines)}</ul>"


def _encoded(picture: Path) -> str:
    return base64.b64encode(picture.read_bytes()).decode()


def _table(results: Sequence[Result]) -> str:
    rows = []
    memory_head = ["peak memory"] if results[0].peak_bytes is not None else []
    for result in results:
        low, middle, high = result.milliseconds
        parts = "".join(f"<td>{result.parts[part][1]:.3g}</td>" for part in PARTS if result.parts)
        parts = parts or f'<td colspan="{len(PARTS)}">all in one</td>'
        memory = f"<td>{result.peak_bytes / 2**20:.0f} MiB</td>" if result.peak_bytes is not None else ""
        rows.append(
            f"<tr><td>{html.escape(result.label)}</td><td>{result.learning_rate:g}</td><td>{middle:.3f}</td>"
            f"<td>{low:.3f} to {high:.3f}</td>{parts}"
            f"<td>{result.throughput:.4g}</td>{memory}<td>{html.escape(str(result.speedup))}</td><td>{result.sameness}</td></tr>"
        )
    names = ["mode", "lr", "ms per step", "20% to 80%", "forward", "backward", "update", "samples/s", *memory_head,
             "speed-up [95%]", "training"]  # fmt: skip
    head = "".join(f"<th>{name}</th>" for name in names)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
