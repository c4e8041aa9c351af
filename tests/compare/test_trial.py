"""One training: its batches, its random numbers, and what is wrong with a model."""

import pytest
import torch
from torch import nn

from compare.own import Spoilt, own, small
from gradweave.compare import compare
from gradweave.compare.trial import Setting
from gradweave.compare.workloads import WORKLOADS, Workload
from gradweave.errors import GradweaveError


def test_random_numbers_of_variants_do_not_mix():
    def model():
        return nn.Sequential(nn.Linear(64, 32), nn.Dropout(0.5), nn.Linear(32, 64))

    base = WORKLOADS["autoencoder"]
    workload = Workload("dropout", model, base.make_data, base.loss)
    result = compare(Setting(workload, batch=256), ["backward", "forward"], steps=20)
    assert all(r.identical for r in result.results)
    assert torch.is_tensor(result.trials[0].model[0].weight)


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        (own(lambda: small().requires_grad_(False)), "model='own': has no parameters to train, or all are frozen"),
        (own(nn.ReLU), "has no parameters to train"),
        (own(lambda: 1 / 0), "cannot be built: ZeroDivisionError"),
        (own(lambda: nn.Linear(7, 7)), "fails in a training step: RuntimeError: mat1 and mat2"),
        (own(small, lambda *_: []), "makes no batch of 32 samples"),
        (own(small, lambda *_: 1 / 0), "its data cannot be made: ZeroDivisionError"),
        (own(lambda: Spoilt(4)), "the loss of step 5 of stock training is nan: nothing can be compared"),
        (own(lambda: Spoilt(33)), "the loss of step 34 of stock training is nan"),
    ],
)
def test_what_is_wrong_with_a_model_is_an_error_of_it(workload, message):
    with pytest.raises(GradweaveError) as error:
        compare(Setting(workload), ["forward"], steps=20)
    assert message in str(error.value)


def test_the_samples_that_are_there_are_counted_whatever_was_asked_for():
    def few(batch, generator):
        assert batch == 32
        return [(torch.rand(n, 64), torch.rand(n, 64)) for n in (5, 7)]

    compared = compare(Setting(own(small, few)), ["forward"], steps=20)
    assert compared.samples == (5, 7)
    assert "batches of 5 to 7" in compared.title
    for result in compared.results:
        assert result.throughput == pytest.approx(6 / result.milliseconds[1] * 1e3)


def test_partly_frozen_models_train_in_every_mode():
    def half_frozen():
        model = small()
        model[0].requires_grad_(False)
        return model

    compared = compare(Setting(own(half_frozen)), ["hook", "backward", "forward"], steps=20)
    assert all(result.identical for result in compared.results)
    assert compared.parameters == 8 * 64 + 64
