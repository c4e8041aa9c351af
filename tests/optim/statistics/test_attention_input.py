"""The projections of nn.MultiheadAttention: three matrices of the module's inputs, and one that is applied inside."""

import pytest
import torch
from torch import nn

from gradweave.optim import Eva, EvaF
from optim.models import train, weights


def make(bias=True, **options):
    torch.manual_seed(0)
    return nn.MultiheadAttention(6, 2, bias=bias, batch_first=True, **options)


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("cross", [True, False])
def test_input_vectors_are_means_of_queries_keys_and_values(by_name, cross):
    module = make()
    optimizer = EvaF(module, lr=0.0)
    query = torch.randn(3, 4, 6)
    key = torch.randn(3, 7, 6) if cross else query
    value = torch.randn(3, 7, 6) if cross else query
    called = module(query=query, key=key, value=value) if by_name else module(query, key, value)
    called[0].sum().backward()
    optimizer.step()
    vectors = optimizer.state[module.in_proj_weight]["input_vector"]
    expected = torch.stack([x.mean((0, 1)) for x in (query, key, value)])
    assert torch.allclose(vectors, expected, atol=1e-6)
    (covered,) = optimizer.param_groups
    assert sorted(p.shape for p in covered["params"]) == [(6,), (6, 6), (18,), (18, 6)]


def test_what_stays_with_the_first_order_rule():
    for options, covered in (({"kdim": 5, "vdim": 5}, 2), ({"bias": False}, 2), ({}, 4)):
        attention = make(**options)
        module = nn.Sequential(nn.Linear(6, 6), attention)
        optimizer = Eva(module)
        rest = len(list(attention.parameters())) - covered
        assert [len(group["params"]) for group in optimizer.param_groups] == [2 + covered, *([rest] if rest else [])]
        assert any(p is attention.out_proj.weight for p in optimizer.param_groups[0]["params"])
    module = nn.Sequential(nn.Linear(6, 6), make())
    optimizer = Eva(module, reference=True)
    assert len(optimizer.param_groups[0]["params"]) == 2


def loss_of(model, x):
    return (model(x) - 1).square().mean()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
@pytest.mark.parametrize("cls", [Eva, EvaF])
def test_encoder_layers_train_and_compile_as_one_graph(cls):
    torch._dynamo.reset()
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        optimizer = cls(model, lr=0.01)
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        losses = train(run, optimizer, [torch.ones(3, 4, 6).cumsum(1).cos()] * 8, loss=loss_of)
        results.append(weights(model))
    assert losses[-1] < losses[0]
    assert torch.allclose(results[0], results[1], atol=1e-4)
