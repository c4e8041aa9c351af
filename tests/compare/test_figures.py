"""Timelines of several trials share one axis."""

from dataclasses import replace

from compare.sharing import together
from gradweave.compare.figures import _on_one_axis


@together
def test_every_timeline_begins_at_its_first_step_and_slow_ones_shrink_no_other(comparison):
    timelines = [trial.timeline for trial in comparison.trials]
    assert all(min(span.start for span in timeline.spans) == 0.0 for timeline in timelines)
    slow = tuple(span._replace(start=10 * span.start, end=10 * span.end) for span in timelines[0].spans)
    shown = _on_one_axis([replace(timelines[0], spans=slow), timelines[0]])
    assert {span.task.step for span in shown[0].spans} == {0, 1}
    assert shown[0].title == "fused (first 2 of 6 steps)"
    assert shown[1] == timelines[0]
