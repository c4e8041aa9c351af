"""Eva-s: vectors of the gradient itself."""

import pytest
import torch
from torch import nn

from gradweave.errors import UnsupportedError
from gradweave.optim import EvaS


def are_finite(model):
    return all(p.isfinite().all() for p in model.parameters())


def test_a_gradient_that_dies_fades_from_its_means():
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = EvaS(model)
    for step in range(1100):
        (model(torch.randn(6, 4)).square().mean() * (step < 3)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert are_finite(model)


def make_tensors():
    torch.manual_seed(0)
    model = nn.Module()
    model.cube, model.matrix = nn.Parameter(torch.randn(2, 3, 4)), nn.Parameter(torch.randn(5, 6))
    model.vector, model.empty = nn.Parameter(torch.randn(7)), nn.Parameter(torch.zeros(0, 3))
    return model


def test_every_tensor_of_two_dimensions_or_more_is_covered():
    model = make_tensors()
    covered, rest = EvaS(model).param_groups
    assert covered["params"] == [model.cube, model.matrix]
    assert rest["params"] == [model.vector, model.empty]


@pytest.mark.parametrize(
    ("mode", "modes"), [({}, (2, 12)), ({"faithful": True}, (2, 3, 4)), ({"reference": True}, (2, 3, 4))]
)
def test_a_vector_is_the_gradients_mean_over_all_other_modes(mode, modes):
    model = make_tensors()
    optimizer = EvaS(model, **mode)
    model.cube.grad = torch.randn(2, 3, 4)
    optimizer.step()
    vectors = optimizer.state[model.cube]["mode_vectors"].split(modes)
    for axis, vector in enumerate(vectors):
        others = [other for other in range(len(modes)) if other != axis]
        torch.testing.assert_close(vector, model.cube.grad.reshape(modes).mean(others))


def test_the_authors_code_sums_vectors_up():
    model = make_tensors()
    optimizer = EvaS(model, reference=True)
    model.matrix.grad = torch.ones(5, 6)
    for steps in range(1, 4):
        optimizer.step()
        assert optimizer.state[model.matrix]["mode_vectors"].tolist() == pytest.approx([steps] * 11)


def test_a_model_without_matrices_is_refused():
    with pytest.raises(UnsupportedError, match=r"LayerNorm: it has no matrix to train; use torch\.optim\.AdamW"):
        EvaS(nn.LayerNorm(3))
