import pytest
import torch
from torch import nn

from gradweave.compare.models import GPT, MLP, Autoencoder, MobileNetV2, ResNet18


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("model", "parameters"),
    [(MobileNetV2, 3_504_872), (ResNet18, 11_689_512)],
)
def test_parameters_are_the_published_ones(model, parameters):
    assert count(model()) == parameters


def test_gpt2_small_has_its_parameters_and_a_head_of_its_own():
    with torch.device("meta"):
        model = GPT(vocabulary=50257)
    assert count(model) == 124_439_808 + 50257 * 768


@pytest.mark.parametrize(
    ("model", "shape", "output"),
    [
        (MobileNetV2(classes=7), (2, 3, 64, 64), (2, 7)),
        (ResNet18(classes=7), (2, 3, 64, 64), (2, 7)),
        (MLP(width=16, depth=2, classes=7), (2, 16), (2, 7)),
        (Autoencoder(), (2, 64), (2, 64)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_shapes(model, shape, output):
    assert model(torch.randn(*shape)).shape == output


def test_recomputing_changes_memory_not_the_result():
    tokens = torch.randint(0, 32, (2, 8))
    losses, grads = [], []
    for recompute in (False, True):
        torch.manual_seed(0)
        model = GPT(vocabulary=32, width=16, blocks=2, heads=2, tokens=8, recompute=recompute)
        loss = model(tokens).square().mean()
        loss.backward()
        losses.append(loss.item())
        grads.append([p.grad for p in model.parameters()])
    assert losses[0] == losses[1]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_a_gpt_does_not_see_the_future():
    torch.manual_seed(0)
    model = GPT(vocabulary=32, width=16, blocks=2, heads=2, tokens=8)
    tokens = torch.randint(0, 32, (1, 8))
    changed = tokens.clone()
    changed[0, -1] = (changed[0, -1] + 1) % 32
    torch.testing.assert_close(model(tokens)[:, :-1], model(changed)[:, :-1])
