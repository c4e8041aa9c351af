"""Runs of the schedules that ``gradweave plan`` predicts, recorded as timelines."""

from __future__ import annotations

from dataclasses import replace

from gradweave.compare.trial import Trial
from gradweave.compare.workloads import Batches
from gradweave.reordering import layer_names, reorder, split_in_order
from gradweave.schedule.costs import Costs
from gradweave.schedule.tasks import Kind
from gradweave.schedule.timeline import Span, Timeline

_SETTLING_STEPS = 2
_RECORDED_STEPS = 4


def measure_planned(trial: Trial, batches: Batches, costs: Costs) -> dict[str, Timeline]:
    """Return measured timelines by policy, with weight gradients apart from the rest of backward.

    On a CPU only stock order is measured, since there is no stream to run beside.

    Args:
        trial: A stock training, which continues meanwhile.
        batches: Batches to train on.
        costs: Costs by which the joint schedule is planned.
    """
    model = trial.model
    policies = ("in_order", "side_stream", "joint") if trial.setting.device.type == "cuda" else ("in_order",)
    timelines = {}
    for policy in policies:
        if policy == "in_order":
            handle = split_in_order(model)
        elif policy == "side_stream":
            handle = reorder(model, "side_stream")
        else:
            handle = reorder(model, "joint", costs=costs)
        trial.variant.reordering = handle
        try:
            trial.run_block(batches, _SETTLING_STEPS, timed=False)
            trial.record(batches, _RECORDED_STEPS)
        finally:
            trial.variant.reordering = None
            handle.detach()
        if trial.timeline is not None:
            timelines[policy] = _renumbered(trial.timeline, layer_names(model), costs)
    return timelines


def _renumbered(timeline: Timeline, names: list[str], costs: Costs) -> Timeline:
    """Return a timeline whose weight gradients have the layer numbers of the costs, as in predictions.

    The recorder numbers the layers that can be split; costs may have layers besides.

    Args:
        timeline: A recorded timeline.
        names: Names of the layers by the recorder's numbers.
        costs: Costs with named layers.
    """
    number_of = {layer.name: number for number, layer in enumerate(costs.layers)}

    def renumber(span: Span) -> Span:
        if span.task.kind is not Kind.W:
            return span
        layer = number_of.get(names[span.task.layer], span.task.layer) if span.task.layer < len(names) else 0
        return span._replace(task=replace(span.task, layer=layer))

    return replace(timeline, spans=tuple(renumber(span) for span in timeline.spans))
