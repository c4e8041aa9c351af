import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gradweave.parallel.data_parallel.messages import Layer, UseOrder, messages


def layers_of(sizes):
    return [
        Layer(str(number), nn.Identity(), tuple(nn.Parameter(torch.zeros(size)) for size in parts), True)
        for number, parts in enumerate(sizes)
    ]


@given(
    sizes=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=12),
    k=st.integers(0, 12),
    limit=st.integers(1, 200),
)
def test_messages_hold_everything_once_in_the_order_of_sending(sizes, k, limit):
    layers = layers_of(sizes)
    k = min(k, len(layers))
    made = messages(layers, k, limit)
    number = {id(p): n for n, layer in enumerate(layers) for p in layer.params}
    order = [number[id(p)] for message in made for p in message]
    assert len(order) == sum(map(len, sizes))
    first_held = len(order) - sum(map(len, sizes[:k]))
    assert order[:first_held] == sorted(order[:first_held], reverse=True)
    assert order[first_held:] == sorted(order[first_held:])
    assert set(order[first_held:]) == set(range(k))
    for message in made:
        assert sum(4 * p.numel() for p in message[:-1]) < limit
        assert len({number[id(p)] < k for p in message}) == 1


def test_types_do_not_share_a_message():
    layers = [
        Layer("a", nn.Identity(), (nn.Parameter(torch.zeros(3)),), True),
        Layer("b", nn.Identity(), (nn.Parameter(torch.zeros(3, dtype=torch.float64)),), True),
    ]
    assert [[p.dtype for p in message] for message in messages(layers, 0, 1000)] == [[torch.float64], [torch.float32]]


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
