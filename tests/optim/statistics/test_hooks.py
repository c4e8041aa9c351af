"""Statistics are collected as often as gradients are, in every way a model is run."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradweave.errors import GradweaveError
from gradweave.optim import Eva, EvaF
from gradweave.optim.statistics.hooks import MaskContext, StatisticsOptions
from optim.models import images, loss_of, make_conv, make_mlp, rows
from optim.statistics.collected import ALL, collect, parts, records, single


def test_padding_is_left_out_by_a_mask():
    module = nn.Linear(3, 2)
    x, mask = torch.randn(4, 5, 3), torch.rand(4, 5) > 0.5
    capture = collect(nn.Sequential(module))
    with MaskContext(capture.masking, mask):
        y = module(x)
    y.retain_grad()
    y.square().sum().backward()
    a, count, b = parts(capture.layers[0])
    assert count == mask.sum()
    assert torch.allclose(a[0], x[mask].sum(0), atol=1e-6)
    assert torch.allclose(b[0], y.grad[mask].sum(0), atol=1e-6)
    module(torch.randn(7, 3)).sum().backward()
    assert parts(capture.layers[0])[1] == mask.sum() + 7


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
def test_masks_go_into_whole_graphs():
    torch._dynamo.reset()
    module = nn.Linear(3, 2)
    capture = collect(nn.Sequential(module))

    @torch.compile(backend="aot_eager", fullgraph=True)
    def loss(x, mask):
        with MaskContext(capture.masking, mask):
            return module(x).square().sum()

    total = 0
    for _ in range(2):
        x, mask = torch.randn(4, 5, 3), torch.rand(4, 5) > 0.5
        loss(x, mask).backward()
        total = total + x[mask].sum(0)
    assert torch.allclose(parts(capture.layers[0])[0][0], total, atol=1e-5)


def test_slices_of_a_batch():
    x = torch.randn(10, 3)
    layer, g = single(nn.Linear(3, 2), x, StatisticsOptions(True, 4, 4, per_sample=False))
    a, count, b = parts(layer)
    assert count == 4
    assert torch.allclose(a[0], x[:4].sum(0))
    assert torch.allclose(b[0], g[:4].sum(0))
    layer, g = single(nn.Linear(3, 2), x, StatisticsOptions(True, None, 4))
    assert torch.allclose(parts(layer)[2][0], g[:4].sum(0) * 10 / 4)


def test_output_vectors_in_front_of_a_batch_norm_are_not_zero_if_they_are_of_some_samples():
    def size(options):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        capture = collect(model, options)
        model(torch.randn(32, 3, 6, 6)).square().sum().backward()
        return parts(capture.layers[0])[2].norm()

    assert size(ALL) < 1e-3
    assert size(StatisticsOptions(True, None, 16)) > 1


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
@pytest.mark.parametrize(
    ("backend", "make", "batches"), [("aot_eager", make_conv, images(2)), ("inductor", make_mlp, rows(2))]
)
def test_whole_graphs(backend, make, batches):
    torch._dynamo.reset()
    capture = collect(model := make())
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    plain = make()
    expected = collect(plain)
    for x in batches:
        loss_of(plain, x).backward()
        loss_of(compiled, x).backward()
    for one, other in zip(records(expected), records(capture), strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5)
        assert other[:-1].abs().sum() > 0


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_counts_once(reentrant):
    x = images(1)[0]
    plain, model = make_conv(), make_conv()
    expected, capture = collect(plain), collect(model)
    loss_of(plain, x).backward()
    ran = checkpoint(model, x.clone().requires_grad_(), use_reentrant=reentrant)
    (ran - 1).square().mean().backward()
    for one, other in zip(records(expected), records(capture), strict=True):
        assert torch.allclose(one, other)


def test_what_is_not_differentiated_is_not_caught():
    model = make_mlp()
    capture = collect(model)
    x = rows(1)[0]
    with torch.no_grad():
        model(x)
    model(x)
    model.eval()
    with torch.inference_mode():
        model(x)
    assert all(record.count_nonzero() == 0 for record in records(capture))


def test_micro_batches_and_shared_layers_add_up():
    model = make_mlp()
    capture = collect(model)
    x = rows(1)[0]
    loss_of(model, x).backward()
    whole = records(capture)
    for layer in capture.layers:
        layer.tap.record.zero_()
    for part in x.split(4):
        (loss_of(model, part) / 3).backward()
    for one, other in zip(whole, records(capture), strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    layer = nn.Linear(3, 3)
    capture = collect(nn.Sequential(layer))
    y = torch.randn(5, 3)
    layer(layer(y)).sum().backward()
    assert torch.allclose(parts(capture.layers[0])[0][0], y.sum(0) + layer(y).sum(0), atol=1e-5)
    assert parts(capture.layers[0])[1] == 10


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_keeps_vectors_in_float32(dtype):
    plain, model = make_mlp(), make_mlp()
    expected, capture = collect(plain), collect(model)
    x = rows(1)[0]
    loss_of(plain, x).backward()
    with torch.autocast("cpu", dtype):
        loss = loss_of(model, x)
    loss.backward()
    for one, other in zip(records(expected), records(capture), strict=True):
        assert other.dtype == torch.float32
        assert torch.allclose(one, other, rtol=0.1, atol=0.05)
    (tiny := nn.Linear(1, 1, bias=False)).to(dtype)
    capture = collect(nn.Sequential(tiny))
    tiny(torch.ones(100, 1, dtype=dtype)).sum().mul(1e-7 if dtype == torch.float16 else 1e-30).backward()
    assert parts(capture.layers[0])[2] > 0


def test_function_transforms_are_left_alone():
    model = make_mlp()
    capture = collect(model)
    params = dict(model.named_parameters())

    def loss(params, x):
        return torch.func.functional_call(model, params, (x,)).square().mean()

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, rows(1)[0])
    assert gradients["0.weight"].shape == (12, 8, 6)
    assert all(record.count_nonzero() == 0 for record in records(capture))


def test_double_backward_goes_through():
    model = make_mlp()
    collect(model)
    x = rows(1)[0].requires_grad_()
    (gradient,) = torch.autograd.grad(loss_of(model, x), x, create_graph=True)
    gradient.square().sum().backward()
    plain = make_mlp()
    y = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(loss_of(plain, y), y, create_graph=True)
    gradient.square().sum().backward()
    assert torch.equal(plain[0].weight.grad, model[0].weight.grad)


def test_a_changed_layer_is_named():
    model = make_mlp()
    collect(model)
    model[0].weight = nn.Parameter(torch.zeros(8, 7))
    with pytest.raises(GradweaveError, match=r"\(8, 7\), which was \(8, 6\)"):
        model[0](torch.randn(2, 7))


@pytest.mark.parametrize("cls", [Eva, EvaF])
@pytest.mark.parametrize("layer", [nn.Linear(5, 3, bias=False), nn.Linear(5, 3), nn.Conv1d(2, 3, 2)])
def test_an_empty_batch_changes_nothing(cls, layer):
    layer = copy.deepcopy(layer)
    optimizer = cls(layer)
    before = [p.detach().clone() for p in layer.parameters()]
    layer(torch.randn(0, *((2, 5) if isinstance(layer, nn.Conv1d) else (5,)))).sum().backward()
    optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(layer.parameters(), before, strict=True))


class TestBackwardsThatGiveTheWeightNothing:
    """What is caught is caught as often as the weight gets a gradient, and in no other backward."""

    def places(self, use):
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
        optimizer = EvaF(model)
        x = torch.randn(8, 4, requires_grad=True)
        use(model, x)
        return [int(optimizer.state[layer.weight]["record"][layer.in_features]) for layer in (model[0], model[2])]

    def test_gradients_of_the_input_alone(self):
        assert self.places(lambda model, x: torch.autograd.grad(model(x).sum(), x)) == [0, 0]
        assert self.places(lambda model, x: model(x).sum().backward(inputs=[x])) == [0, 0]

    def test_gradients_of_some_weights_or_of_all(self):
        assert self.places(lambda model, x: torch.autograd.grad(model(x).sum(), model[2].weight)) == [0, 8]
        assert self.places(lambda model, x: torch.autograd.grad(model(x).sum(), list(model.parameters()))) == [8, 8]
        assert self.places(lambda model, x: model(x).sum().backward(inputs=[model[0].weight])) == [8, 0]

    def test_a_backward_of_each_kind_through_one_graph(self):
        def use(model, x):
            loss = model(x).sum()
            torch.autograd.grad(loss, x, retain_graph=True)
            loss.backward()

        assert self.places(use) == [8, 8]

    def test_other_weights_in_the_place_of_the_own(self):
        def use(model, x):
            others = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
            torch.func.functional_call(model, others, (x,)).sum().backward()

        assert self.places(use) == [0, 0]


def test_masks_inside_of_each_other_and_rows_that_hold_anything():
    model = nn.Sequential(nn.Linear(4, 3))
    optimizer = EvaF(model)
    x = torch.randn(2, 3, 4)
    x[0, 0] = torch.nan
    outer, inner = torch.ones(2, 3, dtype=torch.bool), torch.ones(2, 3, dtype=torch.bool)
    outer[0] = inner[0, 0] = False
    with optimizer.padding_mask(outer):
        with optimizer.padding_mask(inner):
            model(x).nansum().backward()
        model(x).nansum().backward()
    record = optimizer.state[model[0].weight]["record"]
    assert record.tolist() == pytest.approx([*(x[0, 1:].sum(0) + 2 * x[1].sum(0)).tolist(), 8.0])


def test_nested_tensors_are_left_alone():
    model = nn.Linear(4, 3)
    optimizer = EvaF(model)
    x = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)], layout=torch.jagged)
    model(x).values().sum().backward()
    assert optimizer.state[model.weight]["record"].count_nonzero() == 0


@pytest.mark.parametrize("is_seen", [True, False], ids=["after the optimizer's hook", "before it"])
def test_a_loss_of_a_layer_by_itself_under_autocast(is_seen):
    """Its backward runs in a hook: it is counted if the layer has been seen by then, and the graph is gone after it."""

    def own_loss(_, args, y):
        y.float().square().mean().backward()
        return y.detach()

    model, stock = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    stock.load_state_dict(model.state_dict())
    stock[0].register_forward_hook(own_loss)
    if is_seen:
        optimizer = EvaF(model)
        model[0].register_forward_hook(own_loss)
    else:
        model[0].register_forward_hook(own_loss)
        optimizer = EvaF(model)
    x = torch.randn(5, 4)
    for one in (model, stock):
        with torch.autocast("cpu", torch.bfloat16):
            y = one(x)
        y.float().sum().backward()
    for p, q in zip(model.parameters(), stock.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    first, second = (optimizer.state[layer.weight]["record"].tolist() for layer in model)
    assert first == pytest.approx([*x.sum(0).tolist(), 5.0] if is_seen else [0.0] * 5)
    assert second[-1] == 5
