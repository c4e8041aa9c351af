import torch
from torch import nn

from gradweave.parallel.daso.replica import Replica


def test_parameters_that_are_unfrozen_or_added_are_included_once():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1).requires_grad_(False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replica = Replica(model, optimizer)
    assert replica.weights.tensors == list(model[0].parameters())
    assert not replica.has_grown(replica.params())
    model[1].bias.requires_grad_(True)
    assert replica.has_grown(replica.params())
    assert replica.added(replica.params()) == []
    assert replica.include(replica.params())
    extra = torch.ones(3, requires_grad=True)
    optimizer.add_param_group({"params": [extra]})
    assert replica.added(replica.params())[0] is extra
    assert replica.include(replica.params())
    assert not replica.has_grown(replica.params())
    assert [id(p) for p in replica.weights.tensors] == [*map(id, model[0].parameters()), id(model[1].bias), id(extra)]


def test_statistics_and_moments_are_averaged_and_counts_are_not():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    replica = Replica(model, optimizer)
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    assert replica.running_statistics().numel == 4
    assert replica.optimizer_state().numel == 2 * sum(p.numel() for p in model.parameters())


def test_a_step_without_a_rate_moves_nothing():
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    replica = Replica(model, optimizer)
    assert (replica.lr(), replica.moves()) == (0.0, False)
    optimizer.param_groups[0]["lr"] = 0.5
    assert (replica.lr(), replica.moves()) == (0.5, True)
