import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradweave.parallel.daso import transfer
from gradweave.parallel.daso.consensus import Agreement, Connections, Vote
from gradweave.parallel.daso.flat_buffers import Pool
from played_streams import Races, as_if_on_a_gpu


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


def test_a_transfer_begins_after_its_vectors_and_ends_before_their_use(monkeypatch):
    """With streams that are played on the CPU."""
    races = Races(monkeypatch)
    with races:
        vector = nn.Parameter(torch.ones(4), requires_grad=False)
        with as_if_on_a_gpu():
            side = transfer._SideStream([vector])
        for _ in range(3):
            vector.mul_(2)
            with side.entered():
                total = vector * 3
            with side.again():
                total.add_(1)
            side.join([total])
            total + 0
            del total
    assert races.found == []
    assert list(races.streams.values()) == [7, 6]


class Fails:
    """A message that fails."""

    def __init__(self, error):
        self._error = error

    def wait(self):
        exec("def call():\n    raise error", names := {"__name__": "torch.distributed", "error": self._error})
        names["call"]()


@pytest.mark.parametrize("when", ["begins", "is waited for"])
@pytest.mark.parametrize("kind", ["a device", "a peer"])
def test_a_device_that_fails_in_a_transfer_is_no_lost_peer_and_others_hear_of_it(monkeypatch, when, kind):
    error = {
        "a device": torch.AcceleratorError("CUDA error: the launch timed out and was terminated"),
        "a peer": RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:537] Connection reset by peer"),
    }[kind]
    begin = (lambda *_, **__: Fails(error).wait()) if when == "begins" else (lambda *_, **__: Fails(error))
    monkeypatch.setattr(dist, "all_reduce", begin)
    store = dist.HashStore()
    agreement = Agreement(Connections(lambda: store), node=0, nodes=range(1), timeout=5)
    sent = transfer.Transfer(0, [torch.ones(3)], None, agreement, Vote(True), Pool())
    if kind == "a device":
        with pytest.raises(torch.AcceleratorError) as caught:
            sent.result()
        assert caught.value is error
    else:
        verdict = sent.result()
        assert (verdict.counted, verdict.alive) == (False, (0,))
    assert store.check(["exchange/0/0"]), "the node has voted"
