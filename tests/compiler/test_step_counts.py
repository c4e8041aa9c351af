import pytest
import torch
from torch import nn

import gradweave
from compiler.models import adamw, assert_identical, batches, loss_fn
from gradweave.compiler.step_counts import StepCounts


class LateHead(nn.Module):
    """A head that has its first gradient later than the others."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.late = nn.Linear(48, 8), nn.Linear(8, 5), nn.Linear(8, 5)
        self.use = False

    def forward(self, x):
        inner = torch.tanh(self.body(x))
        return self.head(inner) + (self.late(inner) if self.use else 0)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("lower", ["replay", "inductor"])
@pytest.mark.parametrize("change", ["late head", "cleared", "assigned"])
def test_step_counts_that_differ_and_state_that_is_reset(lower, change, warned):
    def run(lower):
        model = LateHead()
        optimizer = adamw(model.parameters())
        step = gradweave.compile(model, loss_fn, optimizer, lower=lower) if lower else None
        losses = []
        for number, (x, y) in enumerate(batches(8)):
            if number == 4 and change == "late head":
                model.use = True
            elif number == 4 and change == "cleared":
                optimizer.state.clear()
            elif number == 4:
                optimizer.state = type(optimizer.state)(dict)
            if step:
                losses.append(step(x, y))
                continue
            losses.append(loss_fn(model, x, y))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer, torch.stack(losses).detach()

    made, expected = run(lower), run(None)
    torch.testing.assert_close(made[2], expected[2], rtol=1e-5, atol=0)
    counts = [[float(o.state[p]["step"]) for p in o.state] for o in (made[1], expected[1])]
    assert counts[0] == counts[1]
    if lower == "replay":
        assert_identical(made, expected)
    assert not warned()


def stepped(count=3):
    params = [nn.Parameter(torch.ones(2)) for _ in range(count)]
    optimizer = adamw(params)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    return params, optimizer


def test_counts_are_entries_of_the_state_and_advance_together():
    params, optimizer = stepped()
    counts = StepCounts(optimizer, params)
    (vector,) = counts.vectors
    vector.add_(1)
    counts.note_written()
    assert [float(optimizer.state[p]["step"]) for p in params] == [2.0, 2.0, 2.0]
    assert counts.covers(params)
    assert not counts.covers(params[:2])


@pytest.mark.parametrize("how", ["in place", "replaced"])
def test_counts_that_others_have_changed_are_taken_over(how):
    params, optimizer = stepped()
    counts = StepCounts(optimizer, params)
    for p in params:
        if how == "in place":
            optimizer.state[p]["step"].fill_(7)
        else:
            optimizer.state[p]["step"] = torch.tensor(7.0)
    assert counts.refresh()
    assert counts.vectors[0].tolist() == [7.0] * 3
    optimizer.state[params[0]]["step"].fill_(8)
    assert not counts.refresh()


def test_released_counts_are_tensors_of_their_own():
    params, optimizer = stepped()
    counts = StepCounts(optimizer, params)
    counts.release()
    counts.vectors[0].fill_(9)
    assert [float(optimizer.state[p]["step"]) for p in params] == [1.0] * 3
