"""Pipelines of more devices than there are, from the costs of layers that were measured one device at a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tables import append, read

from gradweave.errors import GradweaveError
from gradweave.parallel.pipeline.planner import Plan, Settings, choose
from gradweave.parallel.pipeline.programs import POLICIES
from gradweave.schedule import Costs, LayerCost, Link, Timeline, save_timelines

SIZES = ((8, 24), (16, 48), (48, 96))
"""Devices, and blocks."""
LINKS = ("25Gbit/s,10us", "100Gbit/s,10us", "400Gbit/s,10us")
TRIED_ALONG = "memory_bounded"
"""The policy that is tried wherever modulo and fast_forward are."""
RIVAL = "interleaved_zero_bubble"
DRAWN = ("gpipe", RIVAL, "fast_forward", "modulo")
_MOST_FOR_BUDGETS = 16
"""Devices up to which orders within a bound of bytes are looked for: that takes minutes."""


def tiled(costs: Costs, blocks: int) -> tuple[Costs, list[range]]:
    """A deeper model: the measured blocks, over and over, between the measured ends; and where layers begin.

    A layer of the pipeline is a block; the embeddings go with the first one, the norm with the head.
    """
    before = [layer for layer in costs.layers if layer.name in ("embedding", "position")]
    behind = [layer for layer in costs.layers if layer.name in ("norm", "head")]
    measured: dict[str, list[LayerCost]] = {}
    for layer in costs.layers:
        if layer.name.startswith("blocks."):
            measured.setdefault(layer.name.split(".")[1], []).append(layer)
    kinds = list(measured.values())
    parts = [kinds[number % len(kinds)] for number in range(blocks)]
    parts = [[*before, *parts[0]], *parts[1:], behind]
    layers: list[LayerCost] = []
    spans = []
    for number, part in enumerate(parts):
        spans.append(range(len(layers), len(layers) + len(part)))
        layers += [replace(layer, name=f"{number}.{layer.name}") for layer in part]
    return Costs(tuple(layers), f"{costs.name} of {blocks} blocks (tiled)", costs.source), spans


def merged(costs: Costs, spans: list[range]) -> Costs:
    """One cost per layer of the pipeline, for trying out many plans quickly; their memory is judged in full later."""
    layers = []
    for number, span in enumerate(spans):
        part = [costs.layers[i] for i in span]
        sums = {key: sum(getattr(one, key) for one in part)
                for key in ("forward", "input_grad", "weight_grad", "update", "parameter_bytes")}  # fmt: skip
        ends = {"input_bytes": part[0].input_bytes, "output_bytes": part[-1].output_bytes}
        layers.append(LayerCost(f"{number}", **sums, **ends))
    return Costs(tuple(layers), costs.name, costs.source)


def simulate(path: Path, results: Path) -> None:
    """One row per size, link and policy, and a picture per size at the middle link."""
    measured = Costs.load(path)
    done = {(row["devices"], row["link"]) for row in read(results)}
    for devices, blocks in SIZES:
        costs, spans = tiled(measured, blocks)
        coarse = merged(costs, spans)
        for text in LINKS:
            if (str(devices), text) in done:
                continue
            link = Link.parse(text)
            rows, drawn = [], {}
            wanted = {policy: Settings(policy, devices) for policy in POLICIES if policy != TRIED_ALONG}
            while wanted:
                name, settings = next(iter(wanted.items()))
                del wanted[name]
                found = _cell(settings, costs, spans, coarse, link)
                if found is None:
                    continue
                plan, timeline = found
                drawn[name] = replace(timeline, title=f"{name}, {devices} devices, {blocks} blocks, {text}")
                rows.append({**_row(plan, timeline, devices, blocks, text, costs), "policy": name})
                if name == RIVAL and devices <= _MOST_FOR_BUDGETS:
                    wanted[f"modulo, memory of {RIVAL}"] = Settings("modulo", devices, byte_budget=plan.peak_bytes)
            base = next(row["milliseconds"] for row in rows if row["policy"] == "gpipe")
            for row in rows:
                row["times_as_fast_as_gpipe"] = round(base / row["milliseconds"], 4)
                print({key: row[key] for key in ("devices", "link", "policy", "milliseconds",
                                                 "times_as_fast_as_gpipe", "layers_per_stage")})  # fmt: skip
            append(results, rows)
            if text == LINKS[1]:
                save_timelines([drawn[name] for name in DRAWN if name in drawn],
                               results.with_name(f"{results.stem}-{devices}.png"))  # fmt: skip


def _cell(
    settings: Settings, costs: Costs, spans: list[range], coarse: Costs, link: Link
) -> tuple[Plan, Timeline] | None:
    """The best plan within settings, and its timeline in full detail; None where there is none.

    There are as many micro-batches as devices.
    """
    try:
        plan = choose(settings, coarse, settings.microbatches, link)
    except GradweaveError as error:
        print(f"{settings.policy} on {settings.microbatches} devices: {error}")
        return None
    fine = [range(spans[run[0]].start, spans[run[-1]].stop) for run in plan.runs]
    return plan, plan.program.predict(costs, fine, link=link)


def _row(plan: Plan, timeline: Timeline, devices: int, blocks: int, link: str, costs: Costs) -> dict[str, Any]:
    return {
        "costs": costs.name, "source": Path(costs.source).name, "devices": devices, "blocks": blocks,
        "microbatches": plan.program.microbatches, "link": link, "policy": plan.program.policy,
        "milliseconds": round(1e3 * timeline.makespan, 3),
        "busy": round(sum(timeline.busy[f"gpu{i}"] for i in range(devices)) / devices, 4),
        "exposed_milliseconds": round(1e3 * timeline.exposed_communication, 3),
        "peak_gib": round(timeline.peak_bytes / 2**30, 3),
        "stages_per_device": plan.program.stages // devices, "layers_per_stage": plan.group,
        "max_in_flight": plan.program.max_in_flight or "",
    }  # fmt: skip
