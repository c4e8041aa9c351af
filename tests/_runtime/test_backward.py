"""The end of a backward is told once, to those who asked while it ran, and not if it fails."""

import gc
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from gradweave._runtime.backward import BackwardEnd, BackwardWatch
from gradweave.errors import GradweaveError


@pytest.fixture
def ended():
    return []


@pytest.fixture
def end(ended):
    return BackwardEnd(ended.append)


def noting(end, x):
    """A copy of a tensor whose gradient notes the backward that it comes in."""

    def hook(_):
        end.note()

    y = x * 1
    if y.requires_grad:  # not in the first forward of a reentrant checkpoint
        y.register_hook(hook)
    return y


def test_several_notes_in_a_backward_are_one_call(end, ended):
    x = torch.ones(2, requires_grad=True)
    loss = (noting(end, x) * noting(end, x)).sum()
    assert not ended
    loss.backward()
    assert len(ended) == 1
    assert not end.is_pending
    noting(end, x).sum().backward()
    assert len(set(ended)) == 2


def test_a_backward_inside_another_has_an_end_of_its_own(end, ended):
    x = torch.ones(2, requires_grad=True)
    inside = checkpoint(lambda x: noting(end, x).exp(), noting(end, x), use_reentrant=True)
    noting(end, inside).sum().backward()
    assert len(ended) == len(set(ended)) == 2


def test_a_backward_that_fails_is_not_called_an_end_and_can_be_told(end, ended):
    x = torch.ones(2, requires_grad=True)
    y = x * 1

    def fail(_):
        end.note()
        raise ZeroDivisionError

    y.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        y.sum().backward()
    assert not ended
    assert end.has_failed
    end.forget()
    noting(end, x).sum().backward()
    assert len(ended) == 1
    assert not end.has_failed


def test_a_callback_that_raises_does_not_keep_the_next_one_away():
    calls = []

    def ended(_):
        calls.append(None)
        raise ZeroDivisionError

    end, x = BackwardEnd(ended), torch.ones(2, requires_grad=True)
    for number in range(2):
        with pytest.raises(ZeroDivisionError):
            noting(end, x).sum().backward()
        assert len(calls) == number + 1


def test_the_end_does_not_keep_its_owner_alive():
    class Owner:
        def __init__(self):
            self.end = BackwardEnd(self.ended)

        def ended(self, _):
            """Do nothing."""

    owner = Owner()
    gone = weakref.ref(owner)
    end = owner.end
    x = torch.ones(2, requires_grad=True)
    loss = noting(end, x).sum()
    gc.disable()
    try:
        del owner
        assert gone() is None
    finally:
        gc.enable()
    loss.backward()


def test_a_watch_tells_new_gradients_from_kept_and_cleared_ones():
    p, q = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    ends = []
    watch = BackwardWatch(lambda: ends.append(watch.take_fresh([p, q])), technique="DASO")
    watch.refresh([p, q])
    p.sum().backward()
    assert ends == [[1, 0]]
    watch.remember([p, q])
    assert not watch.cleared
    with watch.paused():
        (p + q).sum().backward()
    assert len(ends) == 1
    p.grad = None
    assert watch.cleared
    watch.detach()
    q.sum().backward()
    assert len(ends) == 1


def test_a_sparse_gradient_is_named():
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    watch = BackwardWatch(lambda: None, technique="DASO")
    watch.refresh(embedding.parameters())
    with pytest.raises(GradweaveError, match="sparse=False"):
        embedding(torch.tensor([1])).sum().backward()
