"""The K-FAC that Eva is measured against: step for step that of explicit matrices, with all that adapts."""

import copy

import pytest
import torch
from kfac import KFAC
from likelihoods import CrossEntropy, SquaredError
from torch import nn

from gradweave.compare.models import GPT
from reference.kfac import SlowKFAC

CASES = 12


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3)).double()


def squared_hessian(outputs):
    return torch.eye(outputs.numel()).double() * 2 / outputs.numel()


def entropy_hessian(logits):
    p = logits.softmax(-1)
    return torch.block_diag(*[torch.diag(row) - torch.outer(row, row) for row in p]) / len(p)


def regression(number):
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(CASES, 4, generator=generator, dtype=torch.float64)
    return x, torch.stack((x[:, 0] * x[:, 1], x[:, 2].sin(), x[:, 3]), 1)


def classification(number):
    x, y = regression(number)
    return x, y.argmax(1)


LOSSES = {
    "squares": (SquaredError(), squared_hessian, regression),
    "classes": (CrossEntropy(), entropy_hessian, classification),
}


def run_both(name, steps=30, **changed):
    """Both optimizers after some steps, and by how much predictions came true."""
    likelihood, hessian, batch = LOSSES[name]
    options = {
        "damping": 0.01, "decay": 0.6, "weight_decay": 1e-3, "adapt_every": 3, "search_every": 4, "invert_every": 3,
        "statistics_share": 0.75, "model_share": 0.5, "seed": 3, **changed,
    }  # fmt: skip
    model = make_model()
    other = copy.deepcopy(model)
    fast, slow = KFAC(model, likelihood, **options), SlowKFAC(other, likelihood, hessian, **options)
    ratios = []
    for number in range(steps):
        fast.step(*batch(number))
        ratios.append(slow.step(*batch(number)))
    return fast, slow, [ratio for ratio in ratios if ratio is not None]


@pytest.mark.parametrize(("name", "damping"), [("squares", 0.01), ("squares", 3.0), ("classes", 0.3)])
def test_thirty_steps_are_those_of_explicit_matrices(name, damping):
    fast, slow, _ = run_both(name, damping=damping)
    for p, q in zip(fast.model.parameters(), slow.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-8)
    assert fast.damping == pytest.approx(slow.damping)
    assert fast.gamma == pytest.approx(slow.gamma)


def test_damping_goes_down_where_predictions_come_true():
    optimizer, _, ratios = run_both("squares", damping=3.0)
    assert min(ratios) > 0.75
    assert optimizer.damping == pytest.approx(3.0 * 0.95**30)


def test_damping_goes_up_where_a_step_gains_less_than_predicted():
    """The curvature of one case of twelve promises too much."""
    optimizer, _, ratios = run_both("classes", damping=0.01, steps=9, model_share=1 / 12)
    assert min(ratios) < 0.25
    assert optimizer.damping > 0.01


@pytest.mark.parametrize(("ratio", "power"), [(0.76, 1), (0.74, 0), (0.26, 0), (0.24, -1), (float("nan"), -1)])
def test_damping_follows_the_share_of_the_prediction_that_came_true(ratio, power):
    optimizer = KFAC(make_model(), SquaredError(), damping=2.0, adapt_every=5)
    optimizer._adapt(ratio)
    assert optimizer.damping == pytest.approx(2.0 * (19 / 20) ** (5 * power))


def test_damping_of_factors_is_searched_for_in_both_directions():
    began = (0.01 + 1e-3) ** 0.5, (3.0 + 1e-3) ** 0.5
    assert run_both("squares", damping=0.01)[0].gamma < 0.7 * began[0]
    assert run_both("squares", damping=3.0)[0].gamma > 1.5 * began[1]


@pytest.mark.parametrize("name", list(LOSSES))
def test_drawn_targets_give_the_losss_second_derivatives(name):
    likelihood, hessian, _ = LOSSES[name]
    outputs = torch.tensor([[0.3, -0.5, 1.0], [2.0, 0.0, -1.0]], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    many = outputs.repeat(20_000, 1)
    drawn = (likelihood.sampled_gradient(many, generator) * len(many)).view(20_000, -1)
    torch.testing.assert_close(drawn.t() @ drawn / 20_000, 2 * hessian(outputs), rtol=0.05, atol=0.01)
    left, right = torch.randn(2, *outputs.shape, generator=generator, dtype=torch.float64)
    expected = left.reshape(-1) @ hessian(outputs) @ right.reshape(-1)
    torch.testing.assert_close(likelihood.curvature(outputs, left, right), expected)


def test_factors_of_a_convolution_are_those_of_its_patches():
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 3, 3, stride=2, padding=1, bias=False)
    model = nn.Sequential(conv, nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(27, 2)).double()
    x, y = torch.randn(4, 2, 5, 5, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    optimizer = KFAC(model, SquaredError(), statistics_share=1.0, seed=5)
    before = copy.deepcopy(model)
    optimizer.step(x, y)

    padded = nn.functional.pad(x, (1, 1, 1, 1))
    patches = torch.stack(
        [padded[n, :, i : i + 3, j : j + 3].reshape(-1) for n in range(4) for i in (0, 2, 4) for j in (0, 2, 4)]
    )
    expected = sum(torch.outer(patch, patch) for patch in patches) / len(patches)
    torch.testing.assert_close(optimizer.blocks[0].inputs, expected)
    caught = []
    before[0].register_forward_hook(lambda _, __, y: y.register_hook(caught.append) and None)
    out = before(x)
    out.backward(SquaredError().sampled_gradient(out.detach(), torch.Generator().manual_seed(5)))
    places = caught[0].permute(0, 2, 3, 1).reshape(-1, 3)
    torch.testing.assert_close(optimizer.blocks[0].outputs, 4 * sum(torch.outer(g, g) for g in places))


def test_running_statistics_are_those_of_training_alone():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    stock = copy.deepcopy(model)
    x, y = torch.randn(16, 3), torch.randn(16, 2)
    KFAC(model, SquaredError(), adapt_every=1).step(x, y)
    stock(x)
    assert torch.equal(model[1].running_mean, stock[1].running_mean)
    assert int(model[1].num_batches_tracked) == 1


def test_steps_under_autocast_are_about_those_without():
    """Through attention, which has no derivative along a direction but in its plain form."""

    def in_half(call, x):
        with torch.autocast("cpu", torch.bfloat16):
            return call(x).float()

    torch.manual_seed(0)
    stock = GPT(vocabulary=11, width=8, blocks=1, heads=2, tokens=6)
    half = copy.deepcopy(stock)
    tokens = torch.randint(0, 11, (16, 7))
    batch = tokens[:, :-1], tokens[:, 1:]
    optimizers = KFAC(stock, CrossEntropy(), damping=3.0), KFAC(half, CrossEntropy(), damping=3.0, forward=in_half)
    before = stock.head.weight.detach().clone()
    for _ in range(4):
        for optimizer in optimizers:
            optimizer.step(*batch)
    moved = stock.head.weight - before
    assert (half.head.weight - stock.head.weight).norm() < 0.1 * moved.norm()


def test_a_layer_that_is_applied_twice_is_refused():
    layer = nn.Linear(3, 3)
    with pytest.raises(RuntimeError, match="not applied once"):
        KFAC(nn.Sequential(layer, nn.Tanh(), layer), SquaredError()).step(torch.randn(8, 3), torch.randn(8, 3))
