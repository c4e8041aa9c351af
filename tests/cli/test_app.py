import sys

import pytest

import gradweave
from gradweave.cli import app, main


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
