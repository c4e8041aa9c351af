import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradweave
from compiler.models import adamw, assert_identical, batches, both, counting, loss_fn, make


def short_last_batch(new_shapes, lower="replay"):
    model = make("mlp" if lower == "replay" else "small")
    optimizer = adamw(model.parameters())
    step = gradweave.compile(model, loss_fn, optimizer, lower=lower, new_shapes=new_shapes)
    losses = []
    for number, (x, y) in enumerate(batches(8)):
        rows = 4 if number % 4 == 3 else 6
        losses.append(step(x[:rows], y[:rows]))
    return model, optimizer, torch.stack(losses)


@pytest.mark.parametrize("new_shapes", ["compile", "eager"])
def test_a_short_last_batch(new_shapes):
    model = make("mlp")
    optimizer = adamw(model.parameters())
    losses = []
    for number, (x, y) in enumerate(batches(8)):
        rows = 4 if number % 4 == 3 else 6
        loss = loss_fn(model, x[:rows], y[:rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    expected = model, optimizer, torch.stack(losses)
    assert_identical(short_last_batch(new_shapes), expected)
    torch.testing.assert_close(short_last_batch("pad")[2], expected[2], rtol=1e-5, atol=0)


class Words(nn.Module):
    """A classifier of bags of words."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Embedding(50, 16), nn.Linear(16, 5)

    def forward(self, words):
        return self.head(torch.tanh(self.inner(words)).mean(1))


@pytest.mark.parametrize("lower", ["replay", "inductor"])
@pytest.mark.parametrize("short", ["rows", "words"])
def test_token_ids_are_not_padded(lower, short, warned):
    generator = torch.Generator().manual_seed(0)
    data = []
    for number in range(6):
        words, y = torch.randint(0, 50, (4, 12), generator=generator), torch.randint(0, 5, (4,), generator=generator)
        if number >= 3:
            words, y = (words[:2], y[:2]) if short == "rows" else (words[:, :7], y)
        data.append((words, y))
    made, expected, _ = both(Words, loss_fn, data, lower, new_shapes="pad")
    torch.testing.assert_close(made[2], expected[2], rtol=1e-5, atol=0)
    if lower == "replay":
        assert_identical(made, expected)
    (message,) = warned()
    assert "tensor 0" in message
    assert "where batches are made" in message


def test_targets_are_padded_with_what_the_loss_leaves_out(warned):
    def with_zero_left_out(model, x, y):
        return F.cross_entropy(model(x), y.view(-1), ignore_index=0)

    data = [(x[: 6 - number % 3], y[: 6 - number % 3].clamp(min=1)) for number, (x, y) in enumerate(batches(7))]
    made, expected, step = both(lambda: make("mlp"), with_zero_left_out, data, new_shapes="pad")
    torch.testing.assert_close(made[2], expected[2], rtol=1e-5, atol=1e-6)
    assert step.eager_reason is None
    assert not warned()


def test_padding_leaves_masks_false():
    def masked(model, x, mask):
        return (model(x).square().mean(1) * mask).sum() / mask.sum()

    model = make("mlp")
    optimizer = adamw(model.parameters())
    step = gradweave.compile(model, masked, optimizer, lower="replay", new_shapes="pad")
    x, _ = next(batches(1))
    step(x, torch.ones(6, dtype=torch.bool))
    step(x, torch.ones(6, dtype=torch.bool))
    expected = masked(model, x[:4], torch.ones(4, dtype=torch.bool)).detach()
    torch.testing.assert_close(step(x[:4], torch.ones(4, dtype=torch.bool)), expected)


def test_alternating_shapes_are_compiled_once_each(monkeypatch):
    from gradweave.compiler import lower

    made = []
    monkeypatch.setattr(lower, "compile_with_inductor", counting(lower.compile_with_inductor, made))
    short_last_batch("compile", "inductor")
    assert len(made) == 4  # scalars and main graph, for two shapes
