import pytest

from gradweave.cli.tables import bytes_text, counted, print_results, seconds_text
from gradweave.schedule import Costs, plan, single


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0 s"), (3.2e-6, "3.2 us"), (0.0125, "12.5 ms"), (1.0, "1 s"), (126.0, "126 s")]
)
def test_seconds(seconds, text):
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * 2**30, "3 GiB"), (5 * 2**40, "5 TiB")]
)
def test_bytes(size, text):
    assert bytes_text(size) == text


def test_a_narrow_terminal_keeps_every_column(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    graph = single(Costs.uniform(3), steps=1)
    results = [(schedule, schedule.simulate()) for schedule in (plan(graph, policy=p) for p in ("in_order", "joint"))]
    print_results(graph, results, None)
    lines = capsys.readouterr().out.splitlines()
    for policy in ("in_order", "joint"):
        assert sum(line.split()[:1] == [policy] for line in lines) == 1
    heads = next(line for line in lines if "policy" in line)
    assert heads.split() == ["policy", "step", "speed-up", "makespan", "peak", "idle", "exposed"]


def test_counted_things_have_their_plural():
    assert [counted(1, "layer"), counted(0, "layer"), counted(3, "micro-batch")] == [
        "1 layer",
        "0 layers",
        "3 micro-batches",
    ]
