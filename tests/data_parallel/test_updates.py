import torch
from torch import nn

from gradweave.data_parallel.reducer import Reducer
from gradweave.data_parallel.updates import AveragedUpdates
from gradweave.fusion.hooks import StepHooks


def test_an_update_waits_for_its_own_message_and_for_no_other():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reducer = Reducer([list(part.parameters()) for part in reversed(model)], None)
    updates = AveragedUpdates(model, optimizer, reducer)
    StepHooks(optimizer, updates.before_step, updates.after_step)
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [message.is_on_its_way for message in reducer.messages] == [True, True, True]
    before = model[1].weight.data_ptr()
    model[1].weight.sum()
    assert model[1].weight.data_ptr() == before
    assert [message.is_on_its_way for message in reducer.messages] == [True, False, True]
    updates.flush()
    assert not any(message.is_on_its_way for message in reducer.messages)


class OnItsWay:
    """A message that arrives when somebody waits for it."""

    def is_completed(self):
        return False

    def wait(self):
        pass


def test_while_gradients_are_waited_for_updates_whose_gradients_are_there_are_done():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reducer = Reducer([list(part.parameters()) for part in reversed(model)], None)
    updates = AveragedUpdates(model, optimizer, reducer)
    StepHooks(optimizer, updates.before_step, updates.after_step)
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for number in (2, 3):  # of the first two layers
        reducer.messages[number]._work = OnItsWay()
    model[0].weight.sum()
    assert [message.is_on_its_way for message in reducer.messages] == [False, False, True, False]
    updates.flush()
    assert not any(message.is_on_its_way for message in reducer.messages)
