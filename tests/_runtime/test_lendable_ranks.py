import copy

import torch

from gradweave._runtime.lendable_ranks import lendable_ranks
from gradweave.optim import Eva, EvaS


def test_an_optimizer_with_statistics_of_backward_lends_its_ranks():
    optimizer = Eva(torch.nn.Linear(2, 2), lr=0.1)
    ranks = lendable_ranks(optimizer)
    ranks.lend(None, lender="a test")
    assert optimizer.ranks.lender == "a test"
    ranks.take_back()
    assert optimizer.ranks.lender is None


def test_most_optimizers_average_nothing():
    model = torch.nn.Linear(2, 2)
    eva = Eva(model, lr=0.1)
    for optimizer in (torch.optim.SGD(model.parameters(), lr=0.1), EvaS(model, lr=0.1), copy.deepcopy(eva)):
        assert lendable_ranks(optimizer) is None
