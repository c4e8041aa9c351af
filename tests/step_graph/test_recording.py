import weakref
from contextlib import contextmanager

import pytest
import torch
from torch import optim

import gradweave
from compiler.models import batches, loss_fn, make
from gradweave._compat.dispatch import EveryCall
from gradweave.schedule.tasks import Kind


class Marks:
    def __init__(self):
        self.seen = []
        self.inside = 0

    @contextmanager
    def __call__(self, kind, layer):
        assert self.inside == 0
        self.inside = 1
        yield
        self.inside = 0
        self.seen.append((kind, layer))


def train(lower, recorded, name="convolutional", **options):
    model = make(name)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    step = gradweave.compile(model, loss_fn, optimizer, lower=lower, **options)
    marks, losses = Marks(), []
    for number, batch in enumerate(batches(8)):
        step.record(marks if number in recorded else None)
        losses.append(step(*batch))
    return marks, torch.stack(losses), model, optimizer


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.5}])
def test_recorded_steps_are_the_same_steps(options):
    marks, losses, model, optimizer = train("replay", {3, 4, 6}, **options)
    _, expected, stock, _ = train("replay", {}, **options)
    assert torch.equal(losses, expected)
    for one, other in zip(model.state_dict().values(), stock.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    assert {kind for kind, _ in marks.seen} == {Kind.F, Kind.X, Kind.W, Kind.U}
    assert all(int(state["step"]) == 8 for state in optimizer.state_dict()["state"].values())


def test_recorded_among_compiled_steps():
    marks, losses, _, optimizer = train("inductor", {3, 5}, name="small")
    _, expected, _, _ = train("inductor", {}, name="small")
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
    assert all(int(state["step"]) == 8 for state in optimizer.state_dict()["state"].values())
    kinds = [kind for kind, _ in marks.seen]
    assert kinds.index(Kind.F) < kinds.index(Kind.X)
    assert kinds[-1] is Kind.U
    assert marks.inside == 0


def test_an_error_in_a_recorded_step_closes_its_task_and_comes_through():
    model = torch.nn.Linear(4, 4)
    step = gradweave.compile(model, lambda m, x: m(x).sum(), optim.SGD(model.parameters(), lr=0.1), lower="replay")
    x = torch.randn(2, 4)
    for _ in range(2):
        step(x)
    entered, left = [], []

    @contextmanager
    def mark(kind, layer):
        entered.append(kind)
        if len(entered) == 2:
            raise ValueError("on purpose")
        yield
        left.append(kind)

    step.record(mark)
    with pytest.raises(ValueError, match="on purpose"):
        step(x)
    assert len(left) == 1
    step.record(None)
    step(x)


def test_what_a_task_has_read_lives_until_its_mark_ends():
    """Memory that is reused before would be overwritten where a mark does the operations again."""
    read, gone = [], []

    @contextmanager
    def mark(*_):
        with EveryCall(lambda _function, args, _kwargs: read.extend(map(weakref.ref, filter(torch.is_tensor, args)))):
            yield
        gone.extend(reference for reference in read if reference() is None)
        read.clear()

    model = make("convolutional")
    step = gradweave.compile(model, loss_fn, optim.SGD(model.parameters(), lr=1e-2), lower="replay")
    for number, batch in enumerate(batches(3)):
        step.record(mark if number == 2 else None)
        step(*batch)
    assert not gone
