import pytest
import torch

POLICIES = [
    {"policy": "in_order"}, {"policy": "no_barrier"}, {"policy": "reverse_first_k", "k": 2},
    {"policy": "reverse_first_k", "k": "all"}, {"policy": "reverse_first_k"}, {"policy": "auto"},
]  # fmt: skip


def same(one, other):
    for key in ("seen", "losses", "norms", "state"):
        assert len(one[key]) == len(other[key])
        for a, b in zip(one[key], other[key], strict=True):
            assert torch.equal(torch.as_tensor(a), torch.as_tensor(b)), key
    assert torch.equal(one["end"], other["end"])


@pytest.mark.parametrize("options", POLICIES, ids=lambda o: " ".join(map(str, o.values())))
@pytest.mark.parametrize("kind", ["mlp", "conv", "gpt", "tied"])
def test_results_are_those_of_ddp_bit_for_bit(two, kind, options):
    options = {**options, "bucket_bytes": 700}
    ours = two.run("train", kind=kind, optimizer="adamw", steps=8, **options)
    ddp = two.run("train", kind=kind, optimizer="adamw", steps=8, way="ddp")
    for rank in range(2):
        same(ours[rank], ddp[rank])
        assert ours[rank]["names"] == [name.removeprefix("module.") for name in ddp[rank]["names"]]
        assert all(torch.equal(a, b) for a, b in zip(ours[rank]["buffers"], ddp[rank]["buffers"], strict=True))
    assert torch.equal(ours[0]["end"], ours[1]["end"])
