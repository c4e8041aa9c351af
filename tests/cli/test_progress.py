import threading
import time

import pytest

from gradweave.cli import progress as progress_
from gradweave.cli.progress import PlainLines, progress, share_done


def test_lines_come_with_what_is_begun_then_now_and_then_with_what_is_left(capsys):
    now = 0.0
    tell = PlainLines(lambda: now)
    for step in range(1001):
        now = step * 2.0
        tell(f"round {step} of 1000", step / 1000)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "round 0 of 1000, 0% done"
    assert lines[1] == "round 2 of 1000, 0% done"
    assert lines[-1].endswith("s left")
    assert 30 < len(lines) < 80
    tell("recording", 1.0)
    assert capsys.readouterr().err == "recording, 100% done, about 1 s left\n"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_no_thread_runs_while_something_is_measured(monkeypatch, is_terminal):
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal, raising=False)
    before = threading.active_count()
    with share_done(quiet=False) as show:
        show("something", 0.5)
        assert threading.active_count() == before


def test_progress_goes_through_all(capsys):
    for quiet in (False, True):
        with progress(["a", "b"], "doing", quiet=quiet) as each:
            assert list(each) == ["a", "b"]
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_what_takes_long_is_named_while_it_does(capsys, monkeypatch):
    monkeypatch.setattr(progress_, "_FIRST_LINE_SECONDS", 0.01)
    before = threading.active_count()
    err = ""
    with progress(["a", "b"], "doing", quiet=False) as each:
        for _ in each:
            until = time.monotonic() + 100
            while "doing b, 2 of 2" not in err and time.monotonic() < until:
                time.sleep(0.02)
                err += capsys.readouterr().err
                if "doing a, 1 of 2, after 1 s" in err and "b" not in err:
                    break
    assert "doing a, 1 of 2, after 1 s" in err
    assert "doing b, 2 of 2, after 1 s" in err
    assert threading.active_count() == before
