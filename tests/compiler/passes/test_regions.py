"""Cutting a step in pieces, and taking it piece by piece: on a CPU one after the other, on a GPU on two streams."""

import pytest
import torch
from torch import nn, optim

import gradweave
from compiler.models import adamw, batches, loss_fn, make
from gradweave._compat.tracing import fake_mode, fake_of, trace_to_graph
from gradweave.compiler import lower
from gradweave.compiler.passes import two_streams as regions
from gradweave.compiler.passes.two_streams import upper_layers
from gradweave.errors import ArgumentError, UnsupportedError
from gradweave.schedule.costs import Costs, LayerCost
from gradweave.schedule.tasks import Demand, Kind
from gradweave.step_graph.tasks import Place
from played_streams import Races, as_if_on_a_gpu

HALF = Demand(0.5, 0.5)


def free_costs(names):
    """Layers that leave half of the device to others."""
    demands = {f"{part}_demand": HALF for part in ("forward", "input_grad", "weight_grad", "update")}
    return Costs(tuple(LayerCost(name, 1.0, 1.0, 1.0, 1.0, **demands) for name in names), name="free")


def names_of(model):
    """Layers in the order in which a step has them."""
    step = gradweave.compile(model, loss_fn, optim.SGD(model.parameters(), lr=0.0), lower="replay")
    marks = []

    class Mark:
        def __init__(self, kind, layer):
            marks.append((kind, layer))

        def __enter__(self):
            pass

        def __exit__(self, *_):
            pass

    for number, batch in enumerate(batches(3)):
        step.record(Mark if number == 2 else None)
        step(*batch)
    return step.recorded_layers


def train(name, monkeypatch, *, upper=None, device="cpu", **options):
    """Losses and weights, with a second stream from a layer on; and the cuts that were made."""
    model = make(name).to(device)
    cuts = []
    real = regions.cut

    def noted(*given):
        cuts.append(real(*given))
        return cuts[-1]

    if upper is not None:
        monkeypatch.setattr(lower, "cut", noted)
        monkeypatch.setattr("gradweave.compiler.program.upper_layers", lambda *_: upper)
        options["costs"] = free_costs(["unused"])
    step = gradweave.compile(model, loss_fn, adamw(model.parameters()), **options)
    losses = torch.stack([step(*(x.to(device) for x in batch)) for batch in batches(8)])
    return losses, model, cuts


@pytest.mark.parametrize(
    ("name", "upper"), [("small", 0), ("mlp", 2), ("convolutional", 1), pytest.param("gpt", 1, marks=pytest.mark.slow)]
)
def test_pieces_are_the_whole_and_take_the_same_steps(name, upper, monkeypatch):
    losses, model, (made,) = train(name, monkeypatch, upper=upper)
    expected, stock, _ = train(name, monkeypatch, lower="replay")
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    for one, other in zip(model.state_dict().values(), stock.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    if upper:
        check_pieces(made, upper)
    else:
        assert made is None


def check_pieces(made, upper):
    """Every operation is in a piece, and the side has weight gradients and updates of the upper layers."""
    pieces = [made.first, made.side, made.rest]
    whole = [node.name for node in made.whole.graph.nodes if node.op == "call_function"]
    inside = [n.name for piece in pieces for n in piece.graph.graph.nodes if n.op == "call_function"]
    assert set(whole) == set(inside)
    assert not made.side.outputs
    own = {n.name for n in made.side.graph.graph.nodes if n.op == "call_function"}
    places = regions._places([n for n in made.whole.graph.nodes if n.op == "call_function"])
    inside_first = {n.name for n in made.first.graph.graph.nodes}
    there = {places[n] for n in places if n.name in own - inside_first}
    assert {place.kind for place in there} == {Kind.W, Kind.U}
    assert {place.layer for place in there} == set(range(upper, 1 + max(place.layer for place in places.values())))


def two_layers(order):
    """A step by hand: ``below`` reads a weight, or not, that the update of the layer above changes."""

    def step(upper, lower, x):
        below = lower * x if order == "apart" else lower * x + upper
        gradient = x * 3
        upper.sub_(gradient)
        lower.sub_(below)
        return [below]

    mode = fake_mode()
    graph = trace_to_graph(step)(*(fake_of(mode, torch.ones(4)) for _ in range(3)))
    kinds = {"gradient": Place(Kind.W, 1), "upper": Place(Kind.U, 1), "lower": Place(Kind.U, 0)}
    written = [n for n in graph.graph.nodes if regions.is_mutable(n)]
    places = {n: Place(Kind.X, 0) for n in graph.graph.nodes if n.op == "call_function"}
    places.update(zip(written, (kinds["upper"], kinds["lower"]), strict=True))
    places[written[0].args[1]] = kinds["gradient"]
    regions.note_places(places)
    return graph


def test_an_update_stays_behind_what_the_other_piece_reads_of_its_weight():
    assert regions.cut(two_layers("apart"), 1) is not None
    assert regions.cut(two_layers("together"), 1) is None


@pytest.mark.parametrize("options", [{"max_grad_norm": 0.1}, {"max_grad_value": 0.01}])
def test_with_clipping(options, monkeypatch):
    losses, _, (made,) = train("small", monkeypatch, upper=1, **options)
    expected, _, _ = train("small", monkeypatch, lower="replay", **options)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    assert (made is None) == ("max_grad_norm" in options)


def test_a_scaled_loss_leaves_nothing_to_run_beside(monkeypatch):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    losses, _, (made,) = train("small", monkeypatch, upper=1, scaler=scaler)
    expected, _, _ = train("small", monkeypatch, lower="replay", scaler=torch.amp.GradScaler("cpu", init_scale=4.0))
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    assert made is None


def test_both_streams_begin_behind_what_comes_first_and_the_step_ends_behind_both(monkeypatch):
    """With streams that are played on the CPU."""
    parts = regions.cut(two_layers("apart"), 1)
    upper, lower, x = (nn.Parameter(torch.full((4,), float(size)), requires_grad=False) for size in (1, 2, 3))
    races = Races(monkeypatch)
    with races:
        step = regions.TwoStreams(parts, [upper, lower, x], lambda graph, _: graph)
        for _ in range(2):
            with as_if_on_a_gpu():
                (below,) = step(upper, lower, x + 0)
            total = below + upper + lower
    assert races.found == []
    _, on_side = races.streams.values()
    assert on_side == 4
    assert total.tolist() == [-21.0] * 4


def test_costs_decide():
    names, gpu = ["a", "b", "c"], torch.device("cuda")
    assert upper_layers(free_costs(names), names, gpu) in (1, 2)
    assert upper_layers(free_costs(names), names, torch.device("cpu")) is None
    assert upper_layers(Costs.uniform(2), ["layer0", "layer1"], gpu) is None
    with pytest.raises(UnsupportedError, match="other layers"):
        upper_layers(free_costs(names), ["a", "b"], gpu)
    with pytest.raises(ArgumentError, match="one stream"):
        gradweave.compile(
            nn.Linear(1, 1), loss_fn, adamw(nn.Linear(1, 1).parameters()), costs=free_costs("a"), lower="replay"
        )


def test_costs_of_the_model_are_taken_and_those_of_another_are_not():
    model = make("small")
    names = names_of(model)
    step = gradweave.compile(model, loss_fn, adamw(model.parameters()), costs=free_costs(names))
    losses = [step(*batch).item() for batch in batches(3)]
    assert all(loss == loss for loss in losses)
    other = nn.Sequential(nn.Flatten(), nn.Linear(48, 5))
    step = gradweave.compile(other, loss_fn, adamw(other.parameters()), costs=free_costs(names))
    first, second, *_ = batches(3)
    step(*first)
    with pytest.raises(gradweave.GradweaveError, match="costs"):
        step(*second)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning", r"ignore:\s*Online softmax:UserWarning")
@pytest.mark.parametrize("name", ["mlp", "convolutional", "gpt"])
def test_two_streams_of_a_gpu(name, monkeypatch):
    losses, _, (made,) = train(name, monkeypatch, upper=1, device="cuda")
    expected, _, _ = train(name, monkeypatch, device="cuda")
    assert made is not None
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
@pytest.mark.parametrize("slow", ["first", "side", "rest"])
def test_a_piece_that_is_slow_is_waited_for(slow, monkeypatch):
    losses, stock, _ = train("mlp", monkeypatch, device="cuda")
    run = regions.TwoStreams._run

    def run_slowly(self, piece, values):
        if piece is getattr(self._parts, slow):
            torch.cuda._sleep(20_000_000)
        run(self, piece, values)

    monkeypatch.setattr(regions.TwoStreams, "_run", run_slowly)
    made, model, (parts,) = train("mlp", monkeypatch, upper=1, device="cuda")
    assert parts is not None
    torch.testing.assert_close(made, losses, rtol=1e-4, atol=1e-5)
    for one, other in zip(model.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
