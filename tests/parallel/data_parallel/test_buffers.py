import torch


def test_everybody_has_the_first_ranks_buffers(two):
    shared = two.run("shares_buffers")
    assert all(torch.equal(shared[rank]["value"], torch.zeros(3)) for rank in range(2))
    assert all(shared[rank]["count"].item() == 7 for rank in range(2))
