"""Carrying out schedules that ``gradweave plan`` predicts, and recording what they do."""

from __future__ import annotations

from dataclasses import replace

import torch

from gradweave.compare.trial import Trial
from gradweave.reordering import Reordering, reorder
from gradweave.reordering.api import layer_names
from gradweave.reordering.executor import Planned
from gradweave.reordering.lanes import InLine
from gradweave.schedule.costs import Costs
from gradweave.schedule.tasks import Kind
from gradweave.schedule.timeline import Span, Timeline

_STEPS = 4


def measure_planned(
    trial: Trial, batches: list[tuple[torch.Tensor, torch.Tensor]], costs: Costs
) -> dict[str, Timeline]:
    """Measured timelines of schedules, by policy, with weight gradients apart from the rest of backward.

    On a CPU only stock order: there is nothing to run beside.

    Args:
        trial: A stock training, which goes on meanwhile; it must not be woven.
        batches: What it trains on.
        costs: By which the joint schedule is planned.
    """
    model = trial.model
    policies = ("in_order", "side_stream", "joint") if trial.setting.device.type == "cuda" else ("in_order",)
    timelines = {}
    for policy in policies:
        if policy == "in_order":
            handle = Reordering(model, Planned(InLine(), ()), None)
        elif policy == "side_stream":
            handle = reorder(model, policy)
        else:
            handle = reorder(model, policy, costs=costs)
        trial.variant.reordering = handle
        try:
            trial.run_block(batches, 2, timed=False)
            trial.record(batches, _STEPS)
        finally:
            trial.variant.reordering = None
            handle.detach()
        if trial.timeline is not None:
            timelines[policy] = _renumbered(trial.timeline, layer_names(model), costs)
    return timelines


def _renumbered(timeline: Timeline, names: list[str], costs: Costs) -> Timeline:
    """With the costs' numbers for the layers of weight gradients."""
    number_of = {layer.name: number for number, layer in enumerate(costs.layers)}

    def renumber(span: Span) -> Span:
        if span.task.kind is not Kind.W:
            return span
        layer = number_of.get(names[span.task.layer], span.task.layer) if span.task.layer < len(names) else 0
        return span._replace(task=replace(span.task, layer=layer))

    return replace(timeline, spans=tuple(renumber(span) for span in timeline.spans))
