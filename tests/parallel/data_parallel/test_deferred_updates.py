import pytest
import torch
from torch import nn

from gradweave._runtime.optimizer_steps.hooks import StepHooks
from gradweave.errors import GradweaveError
from gradweave.parallel.data_parallel.deferred_updates import AveragedUpdates
from gradweave.parallel.data_parallel.reducer import Reducer


class OnItsWay:
    """Work of a message that completes when it is waited for, or has been asked about often enough."""

    def __init__(self, asked=1000):
        self.left = asked

    def is_completed(self):
        self.left -= 1
        return self.left < 0

    def wait(self):
        pass


def stepped(count, each=lambda model: None):
    """Return a chain of layers after its second step, each in a message of its own, the last layer's first."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(count)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reducer = Reducer([list(part.parameters()) for part in reversed(model)], None)
    updates = AveragedUpdates(model, optimizer, reducer)
    StepHooks(optimizer, updates.before_step, updates.after_step)
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        each(model)
        optimizer.zero_grad()
    return model, reducer, updates


def test_an_update_waits_for_its_own_message_and_for_no_other():
    model, reducer, updates = stepped(3)
    assert [message.is_on_its_way for message in reducer.messages] == [True, True, True]
    before = model[1].weight.data_ptr()
    model[1].weight.sum()
    assert model[1].weight.data_ptr() == before
    assert [message.is_on_its_way for message in reducer.messages] == [True, False, True]
    updates.flush()
    assert not any(message.is_on_its_way for message in reducer.messages)


@pytest.mark.parametrize("asked", range(6))
def test_an_update_is_done_once_whenever_its_gradients_arrive(asked):
    expected, _, updates = stepped(3)
    updates.flush()
    model, reducer, updates = stepped(3)
    reducer.messages[2]._work = OnItsWay(asked)
    model[0].weight.sum()
    updates.flush()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))


def test_a_gradient_that_the_loop_keeps_can_be_read_later():
    kept = []
    model, _, updates = stepped(2, lambda model: kept.append(model[1].weight.grad))
    updates.flush()
    assert type(kept[1]) is torch.Tensor
    assert kept[1].norm() > 0
    assert all(p.grad is None for p in model.parameters())


def test_a_gradient_whose_update_is_given_up_is_an_error():
    kept = []
    model, _, updates = stepped(2, lambda model: kept.append(model[1].weight.grad))
    updates.discard()
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(GradweaveError, match="given up"):
        kept[1].norm()


def test_while_gradients_are_waited_for_updates_whose_gradients_are_there_are_done():
    model, reducer, updates = stepped(4)
    for number in (2, 3):  # of the first two layers
        reducer.messages[number]._work = OnItsWay()
    model[0].weight.sum()
    assert [message.is_on_its_way for message in reducer.messages] == [False, False, True, False]
    updates.flush()
    assert not any(message.is_on_its_way for message in reducer.messages)
