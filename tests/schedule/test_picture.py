from dataclasses import replace

import pytest
from matplotlib.image import imread

from gradweave.errors import ArgumentError
from gradweave.schedule import Costs, Kind, Timeline, pipeline, plan, save_timelines, single
from gradweave.schedule.picture import COLOURS, _boxes, _lighter, _numbered_kinds, _steady, save_overlay


def rgb(colour):
    return tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))


@pytest.fixture(scope="module")
def gpipe():
    return plan(pipeline(Costs.uniform(8), stages=4, microbatches=4), policy="gpipe").simulate()


def pixels_of(path):
    image = (imread(path)[:, :, :3] * 255).round().astype(int)
    return image.shape[:2], {tuple(map(int, p)) for p in image.reshape(-1, 3)}, image


def test_a_png_shows_each_kind_and_the_bubbles(gpipe, tmp_path):
    gpipe.save(tmp_path / "x.png")
    (height, width), colours, _ = pixels_of(tmp_path / "x.png")
    assert width > 1000
    assert height > 200
    assert {rgb(COLOURS[kind]) for kind in (Kind.F, Kind.X, Kind.W)} <= colours
    assert rgb(COLOURS[Kind.C]) not in colours
    assert rgb("#e9e9e9") in colours


def test_the_next_step_is_lighter(tmp_path):
    plan(single(Costs.uniform(4)), policy="in_order").simulate().save(tmp_path / "x.png")
    _, colours, _ = pixels_of(tmp_path / "x.png")
    assert rgb(_lighter(COLOURS[Kind.F])) in colours


def test_stacked_timelines_share_the_time_axis(gpipe, tmp_path):
    faster = plan(pipeline(Costs.uniform(8), stages=4, microbatches=4), policy="modulo").simulate()
    save_timelines([gpipe, faster], tmp_path / "x.png")
    _, _, image = pixels_of(tmp_path / "x.png")
    middle = image.shape[0] // 2
    reach = []
    for half in (image[:middle], image[middle:]):
        drawn = (half == rgb(COLOURS[Kind.W])).all(axis=2).any(axis=0)
        reach.append(int(drawn.nonzero()[0].max()))
    assert reach[1] < reach[0]


def test_an_svg_is_text_and_the_same_each_time(gpipe, tmp_path):
    gpipe.save(tmp_path / "a.svg")
    gpipe.save(tmp_path / "b.svg")
    first, second = ((tmp_path / name).read_text() for name in ("a.svg", "b.svg"))
    assert "<svg" in first
    assert first == second


def test_neighbours_of_one_microbatch_are_drawn_as_one(gpipe):
    spans = [span for span in gpipe.spans if span.lane == "gpu0" and span.task.kind is Kind.F]
    boxes = list(_boxes(spans, 100.0, many_microbatches=True, numbered=()))
    assert [(box.text, box.start, box.end) for box in boxes] == [(str(i), 2.0 * i, 2.0 * i + 2) for i in range(4)]


def test_boxes_are_numbered_by_layer_unless_one_stands_for_all(tmp_path):
    predicted = plan(single(Costs.uniform(3)), policy="in_order").simulate()
    spans = [s if s.task.kind is Kind.W else s._replace(task=replace(s.task, layer=0)) for s in predicted.spans]
    measured = replace(predicted, spans=tuple(spans))
    assert _numbered_kinds([predicted.spans]) == {Kind.F, Kind.X, Kind.W}
    assert _numbered_kinds([measured.spans]) == {Kind.W}
    texts = {box.kind: box.text for box in _boxes(measured.spans, 100.0, many_microbatches=False, numbered=(Kind.W,))}
    assert texts == {Kind.F: "", Kind.X: "", Kind.W: "0", Kind.U: ""}
    measured.save(tmp_path / "x.svg")
    assert "numbers: layers" in (tmp_path / "x.svg").read_text()


def test_missing_folders_are_made_and_bad_paths_are_named(gpipe, tmp_path):
    gpipe.save(tmp_path / "new" / "x.png")
    with pytest.raises(ArgumentError, match=r"\.gif'.*end it in \.png"):
        gpipe.save(tmp_path / "x.gif")
    (tmp_path / "file").write_text("")
    for name in ("file/x.png", "file/x.json"):
        with pytest.raises(ArgumentError, match="cannot be written"):
            gpipe.save(tmp_path / name)


def test_there_must_be_something_to_draw(tmp_path):
    with pytest.raises(ArgumentError, match="at least one with a task"):
        Timeline((), ()).save(tmp_path / "x.png")


def measured_like(predicted, factor):
    """Return a timeline like a recorder's: with other lane names, at another speed."""
    spans = tuple(
        s._replace(lane=s.lane.replace("gpu0", "cpu"), start=s.start * factor, end=s.end * factor)
        for s in predicted.spans
    )
    return replace(predicted, spans=spans, lanes=(("cpu main", "cpu"), ("cpu side", "cpu")), title="measured")


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_predicted_and_measured_lie_over_each_other(tmp_path, suffix):
    predicted = plan(single(Costs.uniform(3), steps=2), policy="side_stream").simulate()
    measured = measured_like(predicted, 1.25)
    path = tmp_path / f"made.{suffix}"
    save_overlay([(predicted, measured), (predicted, predicted)], path)
    assert path.stat().st_size > 5000
    if suffix == "svg":
        text = path.read_text()
        assert "side_stream: " in text
        assert "measured, -20%" in text
        assert "measured, +0%" in text
        assert text.count("gpu0 side") == 2


def test_an_overlay_shows_one_steady_step():
    predicted = plan(single(Costs.uniform(3), steps=3), policy="in_order").simulate()
    shown = _steady(predicted)
    assert min(span.start for span in shown.spans) == 0
    assert {span.task.step for span in shown.spans} == {1, 2}
    assert {span.task.kind for span in shown.spans if span.task.step == 2} == {Kind.F}
    assert shown.makespan == pytest.approx(9 + 3)
    alone = plan(single(Costs.uniform(3), next_forward=False), policy="in_order").simulate()
    assert _steady(alone) == alone


def test_an_overlay_of_nothing_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match="timelines"):
        save_overlay([], tmp_path / "made.png")
    with pytest.raises(ArgumentError, match="path"):
        save_overlay([], tmp_path / "made.json")
