"""Notes live exactly as long as autocast's copies."""

import threading

import pytest
import torch

from gradweave._runtime.split_calls.autocast_cache import AutocastNotes, autocast_dtype, is_cast_once

CPU = torch.device("cpu")


def autocast(**options):
    return torch.autocast("cpu", torch.bfloat16, **options)


def test_notes_live_up_to_the_end_of_the_outermost_context():
    notes = AutocastNotes()
    with autocast():
        notes.of_context(CPU)["key"] = 1
        with autocast():
            assert notes.of_context(CPU)["key"] == 1
        assert notes.of_context(CPU)["key"] == 1
    with autocast():
        assert notes.of_context(CPU) == {}


def test_there_are_no_notes_outside_of_autocast():
    notes = AutocastNotes()
    notes.of_context(CPU)["key"] = 1
    assert notes.of_context(CPU) == {}


def test_each_thread_has_its_own():
    notes, seen = AutocastNotes(), []

    def work():
        with autocast():
            seen.append(dict(notes.of_context(CPU)))

    with autocast():
        notes.of_context(CPU)["key"] = 1
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert seen == [{}]


@pytest.mark.parametrize(
    ("dtype", "used"),
    [(torch.float32, torch.bfloat16), (torch.float64, torch.float64), (torch.int64, torch.int64)],
)
def test_the_precision_of_calls(dtype, used):
    tensor = torch.zeros(2, dtype=dtype)
    assert autocast_dtype(tensor) is dtype
    with autocast():
        assert autocast_dtype(tensor) is used


def test_autocast_caches_copies_of_leaves_that_need_gradients():
    leaf = torch.zeros(2, 2, requires_grad=True)
    with autocast():
        assert is_cast_once(leaf)
        assert not is_cast_once(leaf + 1)
        assert not is_cast_once(torch.zeros(2))
        assert not is_cast_once(leaf.detach().bfloat16().requires_grad_())
    with autocast(cache_enabled=False):
        assert not is_cast_once(leaf)
