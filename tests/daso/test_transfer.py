import torch

from gradweave.daso import transfer


def test_long_vectors_go_in_parts(monkeypatch):
    monkeypatch.setattr(transfer, "CHUNK", 4)
    vectors = [torch.arange(10.0), torch.zeros(0), torch.ones(3)]
    parts = transfer.chunks(vectors)
    assert [len(part) for part in parts] == [4, 4, 2, 3]
    parts[1].zero_()
    assert vectors[0].tolist() == [0, 1, 2, 3, 0, 0, 0, 0, 8, 9]


def test_finite():
    assert transfer.all_finite([torch.full((4,), 3e38), torch.zeros(0)])
    assert not transfer.all_finite([torch.tensor([1.0, float("nan")])])
    assert not transfer.all_finite([torch.tensor([float("inf")]), torch.ones(1)])
