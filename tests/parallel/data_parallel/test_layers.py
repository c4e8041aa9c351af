import torch
from torch import nn

from gradweave.parallel.data_parallel.layers import UseOrder


def test_layers_are_in_the_order_of_use_and_shared_weights_are_the_first_ones():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.late, self.never, self.early = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
            self.norm = nn.LayerNorm(2).requires_grad_(False)
            self.late.weight = self.early.weight

        def forward(self, x):
            return self.norm(self.late(self.early(x)))

    model = Model()
    order = UseOrder(model)
    model(torch.zeros(1, 2))
    order.close()
    layers = order.layers(order.numbers())
    assert [layer.name for layer in layers] == ["early", "late", "never"]
    assert [len(layer.params) for layer in layers] == [2, 1, 2]
    assert [layer.can_wait for layer in layers] == [True, False, True]


def test_a_layer_that_is_used_without_running_is_where_the_model_has_it():
    model = nn.Sequential(nn.Linear(8, 8), nn.TransformerEncoderLayer(8, 2, 8), nn.Linear(8, 8))
    order = UseOrder(model)
    model(torch.zeros(3, 8))
    order.close()
    names = [layer.name for layer in order.layers(order.numbers())]
    assert names.index("1.self_attn") + 1 == names.index("1.self_attn.out_proj") == names.index("1.norm1") - 1
