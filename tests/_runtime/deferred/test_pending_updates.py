import gc
import weakref

import pytest
import torch
from torch import nn

from gradweave import DataParallel, fuse


@pytest.fixture
def no_collection():
    """References alone decide what lives: memory of gradients must not wait for a garbage collection."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def step(call, optimizer, look=lambda: None):
    call(torch.ones(2, 3)).sum().backward()
    looked = look()
    optimizer.step()
    optimizer.zero_grad()
    return looked


@pytest.mark.usefixtures("no_collection")
def test_gradients_are_freed_when_their_update_is_done():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fusion = fuse(model, optimizer, "forward")
    seen = [step(model, optimizer, lambda: [weakref.ref(p.grad) for p in model.parameters()]) for _ in range(4)]
    fusion.flush()
    assert not any(gradient() is not None for gradients in seen for gradient in gradients)


@pytest.mark.usefixtures("no_collection")
def test_the_memory_of_messages_is_used_again():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = DataParallel(model, optimizer, policy="no_barrier")
    places = []
    for _ in range(5):
        step(wrapped, optimizer)
        places.append([message._result.data_ptr() for message in wrapped._reducer.messages])
    assert places[2] == places[3] == places[4]
