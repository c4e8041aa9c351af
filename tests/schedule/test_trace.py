import json

from gradweave.schedule import Costs, Link, pipeline, plan, save_timelines


def test_a_trace_has_a_process_per_timeline_and_a_track_per_lane(tmp_path):
    graph = pipeline(Costs.uniform(4), stages=2, microbatches=2, link=Link(2.0))
    timelines = [plan(graph, policy=name).simulate() for name in ("gpipe", "modulo")]
    save_timelines(timelines, tmp_path / "x.json")
    trace = json.loads((tmp_path / "x.json").read_text())
    events = trace["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "gpipe", 1: "modulo"}
    for process, timeline in enumerate(timelines):
        own = [e for e in events if e["pid"] == process]
        tracks = {e["tid"]: e["args"]["name"] for e in own if e["name"] == "thread_name"}
        assert list(tracks.values()) == [name for name, _ in timeline.lanes]
        complete = sorted((tracks[e["tid"]], e["ts"], e["dur"], e["args"]["task"]) for e in own if e["ph"] == "X")
        assert complete == sorted(
            (s.lane, s.start * 1e6, (s.end - s.start) * 1e6, s.task.label) for s in timeline.spans
        )
        counters = [e["args"]["bytes"] for e in own if e["ph"] == "C"]
        assert max(counters) == timeline.peak_bytes
