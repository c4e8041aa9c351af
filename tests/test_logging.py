import logging
import uuid

import pytest

from gradweave._logging import announce, report


@pytest.fixture
def message():
    """A message that no other test has given."""
    return f"chose forward {uuid.uuid4()}"


def test_a_message_is_said_once(message, caplog):
    with caplog.at_level(logging.INFO, logger="gradweave"):
        announce(message)
        announce(message)
    assert [(record.name, record.getMessage()) for record in caplog.records] == [("gradweave", message)]


@pytest.mark.parametrize(("rank", "heard"), [("0", 1), ("1", 0)])
def test_only_rank_0_speaks(rank, heard, message, caplog, monkeypatch):
    monkeypatch.setenv("RANK", rank)
    with caplog.at_level(logging.INFO, logger="gradweave"):
        announce(message)
    assert len(caplog.records) == heard


@pytest.mark.parametrize(("rank", "heard"), [("0", 2), ("1", 0)])
def test_progress_is_reported_every_time(rank, heard, message, caplog, monkeypatch):
    monkeypatch.setenv("RANK", rank)
    with caplog.at_level(logging.INFO, logger="gradweave"):
        report(message)
        report(message)
    assert len(caplog.records) == heard
