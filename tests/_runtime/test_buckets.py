import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from gradweave import DataParallel
from gradweave._runtime import buckets
from gradweave._runtime.buckets import make_buckets, message_params, with_groups
from gradweave.schedule import Costs, Kind, LayerCost, Link, data_parallel, plan


def params_of(sizes):
    """Layers with parameters of so many elements."""
    return [[nn.Parameter(torch.zeros(size)) for size in parts] for parts in sizes]


def layers_of_messages(messages, layers):
    number = {id(p): n for n, params in enumerate(layers) for p in params}
    return [list(dict.fromkeys(number[id(p)] for p in message)) for message in messages]


def simulated(layers, k, limit):
    """The layers of each message of a schedule, in the order of sending."""
    costs = Costs(
        tuple(LayerCost(str(n), 1.0, 1.0, 1.0, parameter_bytes=4 * sum(p.numel() for p in layer))
              for n, layer in enumerate(layers))
    )  # fmt: skip
    graph = data_parallel(costs, replicas=2, link=Link(1.0))
    schedule = plan(graph, policy="reverse_first_k", k=k, bucket_bytes=limit)
    sent = [span.task for span in schedule.simulate().spans if span.task.kind is Kind.C]
    return [set(range(task.layer, task.layer + task.layers)) for task in sent]


@given(
    sizes=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=12),
    k=st.integers(0, 12),
    limit=st.integers(1, 200),
)
@example(sizes=[[64, 4]] * 6, k=3, limit=256)
@example(sizes=[[1]] * 2, k=1, limit=200)
def test_messages_that_are_sent_are_those_that_are_simulated(sizes, k, limit):
    layers = params_of(sizes)
    k = min(k, len(layers))
    made = message_params(layers, k, limit)
    assert sorted(id(p) for message in made for p in message) == sorted(id(p) for layer in layers for p in layer)
    assert [set(numbers) for numbers in layers_of_messages(made, layers)] == simulated(layers, k, limit)


def test_a_bias_travels_with_its_own_layers_weight():
    """Each weight fills a message by itself, so that a rule by parameter would put biases with the next weight."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = DataParallel(model, optimizer, policy="reverse_first_k", k=3, bucket_bytes=4 * 16 * 16)
    for _ in range(2):
        wrapped(torch.ones(2, 16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    name = {id(p): name for name, p in model.named_parameters()}
    messages = [[name[id(p)] for p in message.params] for message in wrapped._reducer.messages]
    wrapped.detach()
    assert messages == [
        ["5.bias", "5.weight"], ["4.bias", "4.weight"], ["3.bias", "3.weight"],
        ["0.weight", "0.bias"], ["1.weight", "1.bias"], ["2.weight", "2.bias"],
    ]  # fmt: skip


def test_messages_are_divided_by_dtype_and_no_further():
    single, double = torch.float32, torch.float64
    layers = [[nn.Parameter(torch.zeros(3, dtype=dtype)) for dtype in (single, double)] for _ in range(4)]
    made = message_params(layers, 0, 72)  # two layers
    assert [[p.dtype for p in message] for message in made] == [[double] * 2, [single] * 2] * 2
    assert layers_of_messages(made, layers) == [[3, 2], [3, 2], [1, 0], [1, 0]]


@pytest.mark.parametrize(
    ("limit", "expected"), [(1, [[0], [1], [2], [3]]), (24, [[0, 1], [2], [3]]), (99, [[0, 1, 2, 3]])]
)
def test_updates_are_put_together_by_parameter(monkeypatch, limit, expected):
    monkeypatch.setitem(buckets.CPU_BUCKET_BYTES, "forward", limit)
    params = [p for layer in params_of([[4, 2], [6], [1]]) for p in layer]
    optimizer = torch.optim.SGD([{"params": params[::-2]}, {"params": params[-2::-2]}], lr=0.1)
    made = make_buckets(optimizer, params, 3, "forward")
    number = {id(p): n for n, p in enumerate(params)}
    assert [[number[id(p)] for p in bucket.params] for bucket in made] == expected
    assert [bucket.number for bucket in made] == list(range(len(made)))


def test_a_bucket_has_its_parameters_in_the_order_of_the_groups_too():
    params = [p for layer in params_of([[4, 2], [6], [1]]) for p in layer]
    optimizer = torch.optim.SGD([{"params": [params[3], params[1]]}, {"params": [params[0]]}], lr=0.1)
    (bucket,) = with_groups(optimizer, [params, [params[2]]])
    assert [id(p) for p in bucket.params] == [id(params[n]) for n in (0, 1, 3)]
    assert {index: [id(p) for p in own] for index, own in bucket.groups.items()} == {
        0: [id(params[3]), id(params[1])], 1: [id(params[0])],
    }  # fmt: skip


def test_parameters_by_layer_are_each_in_one_place():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2)))
    model[1][1].weight = model[0].weight
    strange = nn.Parameter(torch.ones(1))
    frozen = model[0].bias
    given = [strange, *(p for p in model.parameters() if p is not frozen)]
    layers = buckets.params_by_layer(model, given)
    expected = [[model[0].weight], [model[1][0].weight], [model[1][1].bias], [strange]]
    assert [[id(p) for p in layer] for layer in layers] == [[id(p) for p in layer] for layer in expected]
