"""The tests' own stand-in for streams finds what is in no order, and nothing else."""

import pytest
import torch

from played_streams import Races


@pytest.fixture
def races(monkeypatch):
    return Races(monkeypatch)


def test_what_is_in_no_order_is_a_race(races):
    side = torch.cuda.Stream()
    with races:
        x = torch.ones(3)
        with torch.cuda.stream(side):
            x + 1
    assert [pair[1] for pair in races.found] == ["aten.add.Tensor"]


def test_waits_put_work_in_order(races):
    side = torch.cuda.Stream()
    with races:
        x = torch.ones(3)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.mul_(2)
            done = side.record_event()
        torch.cuda.current_stream().wait_event(done)
        x + 1
    assert not races.found
    assert races.streams == {races.main: 2, side: 1}


def test_a_write_is_in_no_order_with_reads_that_were_not_waited_for(races):
    side = torch.cuda.Stream()
    with races:
        x = torch.ones(3)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x + 1
        x.view(3, 1)
        x * 2  # reads may run at the same time
        assert not races.found
        x.mul_(2)
    assert races.found == [("aten.add.Tensor", "aten.mul_.Tensor")]


@pytest.mark.parametrize("waits", [False, True])
def test_memory_that_is_used_again_before_everybody_is_through_with_it(races, waits):
    side = torch.cuda.Stream()
    with races:
        x = torch.ones(3)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x + 1
        del x
        if waits:
            torch.cuda.current_stream().wait_stream(side)
        torch.ones(5)
    assert races.found == ([] if waits else [("aten.add.Tensor", "memory used again by aten.ones.default")])
