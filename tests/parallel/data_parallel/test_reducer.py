import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradweave._runtime.deferred.pending_gradient import PendingGradient
from gradweave.errors import GradweaveError
from gradweave.parallel.data_parallel.reducer import Reducer


def chain(count=4):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(count)))


def reducer_of(model, **options):
    return Reducer([[part.weight] for part in reversed(model)], None, **options)


def test_gradients_are_pending_after_backward_and_right_when_looked_at():
    model = chain()
    model(torch.ones(2, 3)).sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    reducer = reducer_of(model)
    model(torch.ones(2, 3)).sum().backward()
    assert all(isinstance(p.grad, PendingGradient) for p in model.parameters())
    assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))
    reducer.close()
    model.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    assert not any(isinstance(p.grad, PendingGradient) for p in model.parameters())


def test_a_barrier_leaves_nothing_pending():
    model = chain()
    reducer_of(model, barrier=True)
    model(torch.ones(2, 3)).sum().backward()
    assert not any(isinstance(p.grad, PendingGradient) for p in model.parameters())


def test_waiting_for_one_leaves_the_others():
    model = chain()
    reducer = reducer_of(model)
    model(torch.ones(2, 3)).sum().backward()
    reducer.wait_for([model[1].weight])
    assert [isinstance(p.grad, PendingGradient) for p in model.parameters()] == [True, False, True, True]


def test_an_unused_parameter_has_no_gradient():
    model = chain()
    reducer_of(model)
    model[:2](torch.ones(2, 3)).sum().backward()
    assert [p.grad is None for p in model.parameters()] == [False, False, True, True]


def test_gradients_keep_the_layout_of_their_weights():
    model = nn.Conv2d(3, 4, 3, bias=False).to(memory_format=torch.channels_last)
    Reducer([[model.weight]], None)
    model(torch.ones(1, 3, 5, 5)).sum().backward()
    assert model.weight.grad.stride() == model.weight.stride()


def test_a_sparse_gradient_is_refused():
    model = nn.Embedding(4, 2, sparse=True)
    Reducer([[model.weight]], None)
    with pytest.raises(GradweaveError, match="sparse=False"):
        model(torch.tensor([1])).sum().backward()


def test_adding_to_what_is_on_its_way_waits_for_it():
    model = chain()
    reducer_of(model)
    model(torch.ones(2, 3)).sum().backward()
    once = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()
    assert all(torch.equal(p.grad, 2 * e) for p, e in zip(model.parameters(), once, strict=True))


def test_gradients_that_the_loop_keeps_are_not_overwritten():
    model = chain()
    reducer_of(model)
    model(torch.ones(2, 3)).sum().backward()
    kept = [p.grad for p in model.parameters()]
    flat = model[0].weight.grad.view(-1)
    expected = [g.clone() for g in kept]
    model.zero_grad()
    model(3 * torch.ones(2, 3)).sum().backward()
    assert all(torch.equal(one, other) for one, other in zip(kept, expected, strict=True))
    assert torch.equal(flat, expected[0].view(-1))
    assert not any(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))


def test_memory_that_the_loop_does_not_keep_is_used_again():
    model = chain()
    reducer_of(model)
    places = set()
    for _ in range(3):
        model(torch.ones(2, 3)).sum().backward()
        places.add(model[0].weight.grad.data_ptr())
        model.zero_grad()
    assert len(places) == 1


def test_hooks_of_the_users_come_first():
    model = chain(1)
    reducer_of(model)

    def enlarge(p):
        p.grad.mul_(10)

    model[0].weight.register_post_accumulate_grad_hook(enlarge)
    model(torch.ones(2, 3)).sum().backward()
    assert torch.equal(model[0].weight.grad, torch.full((3, 3), 20.0))


def test_nothing_is_kept_alive():
    model = chain()
    reducer = reducer_of(model)
    model(torch.ones(2, 3)).sum().backward()
    reducer.close()
    message = weakref.ref(reducer.messages[0])
    gc.collect()
    gc.disable()
    try:
        del reducer
        assert message() is None
    finally:
        gc.enable()


def test_a_backward_that_has_failed_is_an_error_until_another_one_has_ended():
    model = chain()
    reducer = reducer_of(model)
    loss = model(torch.ones(2, 3)).sum()

    def fail(_):
        raise ValueError("as the test wants it")

    hook = model[0].weight.register_hook(fail)
    with pytest.raises(ValueError, match="as the test wants it"):
        loss.backward(retain_graph=True)
    with pytest.raises(GradweaveError, match="the last backward failed with 3 of 4 messages"):
        reducer.check_ended()
    hook.remove()
    model.zero_grad()
    loss.backward()
    reducer.check_ended()
    assert all(message.is_on_its_way for message in reducer.messages)


def test_a_backward_inside_of_a_backward_has_a_round_of_its_own():
    model = chain()

    def loss():
        out = checkpoint(model[1:3], model[0](torch.ones(2, 3)), use_reentrant=True)
        return model[3](out).square().sum()

    loss().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    rounds = []
    reducer = reducer_of(model, begins=lambda: rounds.append(1))
    loss().backward()
    reducer.check_ended()
    assert len(rounds) == 3  # of the outer backward up to the checkpoint, of the inner one, and of the rest
    assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))
