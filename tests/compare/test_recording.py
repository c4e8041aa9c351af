import time
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from gradweave.compare import recording
from gradweave.compare.recording import Recorder, _cut
from gradweave.schedule import Kind


def test_what_is_inside_cuts_what_is_around_it():
    assert list(_cut(0, 10, [(2, 3), (5, 6)])) == [(0, 2), (3, 5), (6, 10)]
    assert list(_cut(0, 10, [])) == [(0, 10)]
    assert list(_cut(0, 10, [(0, 10)])) == []


def test_a_timeline_in_the_simulators_form(monkeypatch):
    now = 5.0
    monkeypatch.setattr(recording, "time", SimpleNamespace(perf_counter=lambda: now))
    recorder = Recorder(torch.device("cpu"))
    for step in range(2):
        recorder.step = step
        with recorder.part(Kind.F):
            now += 0.002
        with recorder.part(Kind.X):
            now += 0.002
            with recorder.update(3):
                now += 0.004
    timeline = recorder.timeline("measured")
    assert timeline.lanes == (("cpu main", "cpu"),)
    assert [span.task.kind for span in timeline.spans if span.task.step == 0] == [Kind.F, Kind.X, Kind.U]
    update = next(span for span in timeline.spans if span.task.kind is Kind.U)
    assert (update.task.layer, update.task.note) == (3, "bucket")
    assert update.start == pytest.approx(0.004)
    assert update.end == pytest.approx(0.008)
    for before, after in zip(timeline.spans, timeline.spans[1:], strict=False):
        assert after.start >= before.end


def test_the_time_per_step_is_the_mean_of_all_recorded_steps(monkeypatch):
    now = 0.0
    monkeypatch.setattr(recording, "time", SimpleNamespace(perf_counter=lambda: now))
    recorder = Recorder(torch.device("cpu"))
    for step, backward in enumerate((0.003, 0.004, 0.040, 0.0)):
        recorder.step = step
        with recorder.part(Kind.F):
            now += 0.001
        with recorder.part(Kind.X):
            now += backward
    assert recorder.timeline("measured").step_time == pytest.approx((0.004 + 0.005 + 0.041) / 3)


def test_weight_gradients_cut_backward():
    recorder = Recorder(torch.device("cpu"))
    with recorder.part(Kind.F):
        pass
    with recorder.part(Kind.X):
        for layer in (1, 0):
            time.sleep(0.002)
            with recorder.weight_gradient(layer):
                time.sleep(0.002)
    spans = recorder.timeline("some").spans
    assert "".join(span.task.kind for span in spans).lstrip("F").startswith("XWXW")
    assert [span.task.layer for span in spans if span.task.kind is Kind.W] == [1, 0]
    assert all(a.end <= b.start for a, b in pairwise(spans))


def test_a_step_without_a_forward_of_its_own_is_counted_too():
    recorder = Recorder(torch.device("cpu"))
    time.sleep(0.05)
    for step in range(4):
        recorder.step = step
        with recorder.part(Kind.X):
            time.sleep(0.001)
    timeline = recorder.timeline("a pipeline's")
    assert timeline.spans[0].start == 0.0
    assert timeline.step_time == pytest.approx(timeline.makespan / 4)
