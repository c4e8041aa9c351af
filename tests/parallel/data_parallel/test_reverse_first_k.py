import torch
from torch import nn
from torch.nn import functional as F

from gradweave._runtime.split_calls.queue import InlineLane, WeightGradientQueue
from gradweave.parallel.data_parallel.reverse_first_k import HeldBack


def test_gradients_are_the_stock_ones_and_come_first_layer_first():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv1d(2, 4, 3), nn.Flatten(), nn.Linear(12, 6), nn.ReLU(), nn.Linear(6, 6), nn.Linear(6, 2)
    )
    x = torch.randn(3, 2, 5)
    F.cross_entropy(model(x), torch.tensor([0, 1, 1])).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    came, resolved = [], []
    for number, module in enumerate(model):
        if number not in (1, 3):
            module.weight.register_post_accumulate_grad_hook(lambda _, number=number: came.append(number))
    held = {0: model[0], 1: model[2], 2: model[4]}
    with HeldBack(WeightGradientQueue(InlineLane()), held, resolved.append):
        loss = F.cross_entropy(model(x), torch.tensor([0, 1, 1]))
    loss.backward()
    assert came == [5, 0, 2, 4]
    assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))
    assert [id(p) for p in resolved[::2]] == [id(model[n].weight) for n in (0, 2, 4, 5)]


def test_the_output_projection_of_an_attention_is_held_back():
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    x = torch.randn(2, 5, 8)
    model(x).square().sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    came = []
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: came.append(name))
    with HeldBack(WeightGradientQueue(InlineLane()), {1: model.self_attn.out_proj, 2: model.linear1}, lambda _: None):
        loss = model(x).square().sum()
    loss.backward()
    assert came[-4:-2] == ["self_attn.out_proj.weight", "self_attn.out_proj.bias"]
    assert came[-2:] == ["linear1.weight", "linear1.bias"]
    assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))
