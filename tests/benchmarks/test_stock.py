"""The stock steps that ours are compared with train as the eager one: one that computed less would be no baseline."""

import pytest
import torch


def train(step, model, batches):
    losses = [float(step(batch)) for batch in batches]
    return losses, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(
    ("name", "workload"),
    [
        ("compile", "toy-gpt"),
        ("graph_compile", "toy-gpt"),
        ("graph", "toy-gpt"),
        ("whole", "toy-gpt"),
        ("whole", "toy-mlp"),
        ("whole", "toy-unet"),
        ("whole_max_autotune", "toy-lstm"),
    ],
)
def test_every_stock_step_trains_as_the_eager_one(name, workload):
    from stock import make_stock
    from suite_models import TOYS

    toy = TOYS[workload]
    model, other = toy.model(), toy.model()
    losses, weights = train(make_stock("eager", model, toy.loss_fn, toy.optimizer), model, toy.batches(5))
    other_losses, other_weights = train(make_stock(name, other, toy.loss_fn, toy.optimizer), other, toy.batches(5))
    torch.testing.assert_close(other_losses, losses, rtol=1e-4, atol=0)
    torch.testing.assert_close(other_weights, weights, rtol=1e-4, atol=1e-5)


def test_a_recurrent_network_is_compiled_where_it_is_measured():
    from stock import make_stock
    from suite_models import TOYS

    toy = TOYS["toy-lstm"]
    make_stock("compile", toy.model(), toy.loss_fn, toy.optimizer)
    assert torch._dynamo.config.allow_rnn


def test_a_workload_is_the_same_in_every_process():
    from suite_models import TOYS

    for toy in TOYS.values():
        torch.testing.assert_close(list(toy.model().parameters()), list(toy.model().parameters()), rtol=0, atol=0)
        torch.testing.assert_close(toy.batches(), toy.batches(), rtol=0, atol=0)
        assert not torch.equal(toy.batches()[0][0], toy.batches()[1][0])
