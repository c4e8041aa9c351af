import torch

from gradweave.compare.data import digits, images, token_sequences


def test_digits_are_the_known_ones():
    pixels, labels = digits()
    assert pixels.shape == (1797, 64)
    assert (pixels.min(), pixels.max()) == (0.0, 1.0)
    assert labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert labels[:10].tolist() == list(range(10))


def test_generated_data_is_the_same_for_the_same_seed_and_can_be_learnt():
    one, two = (images(6, (3, 4, 4), 5, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(one[0], two[0])
    assert torch.equal(one[1], two[1])
    tokens = token_sequences(200, 30, 17, torch.Generator().manual_seed(3))
    follows = torch.stack([tokens[:, :-1].flatten(), tokens[:, 1:].flatten()])
    pairs = follows[0] * 17 + follows[1]
    assert pairs.bincount().topk(17).values.sum() > 0.7 * pairs.numel()
