import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import gradweave
from gradweave.cli import app, main

MAIN = "from gradweave.cli import main; main()"
"""The code of the console script."""
SECONDS = 250
"""Longer than the slowest machine takes to start."""


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["gradweave", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    return exit_.value.code


def test_version(monkeypatch, capsys):
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"gradweave {gradweave.__version__}\n"


def test_help_names_the_commands(monkeypatch, capsys):
    assert run(monkeypatch, "--help") == 0
    assert "simulate" in capsys.readouterr().out


def test_no_command_shows_the_help_and_no_empty_error(monkeypatch, capsys):
    assert run(monkeypatch) == 2
    captured = capsys.readouterr()
    assert "simulate" in captured.out
    assert "error" not in captured.err


def test_a_defect_of_ours_is_not_hidden(monkeypatch):
    def broken(**_):
        raise RuntimeError("a defect")

    monkeypatch.setattr(app, "app", broken)
    monkeypatch.setattr(sys, "argv", ["gradweave"])
    with pytest.raises(RuntimeError, match="a defect"):
        main()


def start(*arguments, path="", **more):
    """Start the command like a console script: the current folder is not on the path."""
    environment = {**os.environ, **more.pop("env", {})}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(path), environment.get("PYTHONPATH"))))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **more}
    return subprocess.Popen([sys.executable, "-W", "ignore", "-P", "-c", MAIN, *arguments], env=environment, **pipes)


def test_ctrl_c_is_silent_while_the_command_line_is_still_loading(tmp_path):
    (tmp_path / "typer.py").write_text("import time\nprint('loading', flush=True)\ntime.sleep(60)\n")
    process = start("simulate", "single", path=tmp_path)
    assert process.stdout.readline() == "loading\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, out, err) == (130, "", "")


def test_ctrl_c_is_silent_later_too(tmp_path):
    (tmp_path / "endless.py").write_text("import time\nprint('loading', flush=True)\ntime.sleep(60)\n")
    process = start("compare", "--model", "endless:f", cwd=tmp_path)
    assert process.stdout.readline() == "loading\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, out, err) == (130, "", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_one_line():
    with Path("/dev/full").open("w") as full:
        process = start("simulate", "single", "--policy", "in_order", stdout=full)
        _, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, err) == (2, "error: cannot write: No space left on device\n")


def test_a_reader_that_leaves_is_no_traceback():
    reads, writes = os.pipe()
    os.close(reads)
    process = start("simulate", "single", "--policy", "in_order", stdout=writes)
    os.close(writes)
    _, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, err) == (1, "")


def test_the_plotting_backend_of_the_environment_does_not_matter(tmp_path):
    process = start(
        "simulate", "single", "--policy", "in_order", "--out", str(tmp_path / "x.png"), env={"MPLBACKEND": "nonsense"}
    )
    _, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, err) == (0, "")
    assert (tmp_path / "x.png").stat().st_size > 10_000
