"""Layers cut into stages."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradweave.errors import ArgumentError
from gradweave.parallel.pipeline.partition import balance, by_layer, cut, stage_graph
from gradweave.schedule import Costs, Kind, LayerCost


def heaviest(weights, cuts):
    borders = [0, *cuts, len(weights)]
    return max(sum(weights[a:b]) for a, b in pairwise(borders))


@given(weights=st.lists(st.floats(0.0, 10.0), min_size=1, max_size=9), data=st.data())
def test_no_other_cut_has_a_lighter_heaviest_part(weights, data):
    parts = data.draw(st.integers(1, len(weights)))
    runs = balance(weights, parts)
    assert len(runs) == parts
    assert all(runs)
    assert [i for run in runs for i in run] == list(range(len(weights)))
    best = min(heaviest(weights, cuts) for cuts in combinations(range(1, len(weights)), parts - 1))
    assert max(sum(weights[i] for i in run) for run in runs) == pytest.approx(best, rel=1e-6, abs=1e-9)


def test_equal_layers_are_shared_out_evenly():
    assert [len(run) for run in balance([1.0] * 25, 4)] in ([7, 6, 6, 6], [6, 6, 6, 7], [6, 7, 6, 6], [6, 6, 7, 6])
    assert [len(run) for run in balance([3.2] * 24, 16)].count(2) == 8
    with pytest.raises(ArgumentError, match="stages=3: give 1 to 2"):
        balance([1.0, 1.0], 3)


def test_stages_cost_what_their_layers_do_and_send_what_their_ends_do():
    costs = Costs(tuple(LayerCost(f"{i}", 1, 2, 3, 4, 10 + i, 20 + i, 5) for i in range(4)))
    graph = stage_graph(costs, [range(3), range(3, 4)], ranks=2, microbatches=1)
    one, two = graph.costs.layers
    assert (one.forward, one.input_grad, one.weight_grad, one.update) == (3, 6, 9, 12)
    assert (one.input_bytes, one.output_bytes, one.parameter_bytes) == (10, 22, 15)
    assert two.input_bytes == 13


def test_stages_keep_the_inputs_of_all_their_layers_and_the_gradients_of_all_their_outputs():
    costs = Costs(tuple(LayerCost(f"{i}", 1, 2, 3, 4, 10 + i, 20 + i, 5) for i in range(4)))
    graph = stage_graph(costs, [range(3), range(3, 4)], ranks=2, microbatches=2)
    kept: dict[tuple[str, int], int] = {}
    for buffer in graph.buffers:
        first, last = (graph.tasks[buffer.users[place]] for place in (0, -1))
        if last.kind is Kind.W and last.microbatch == 1:
            kept[first.kind, last.layer] = kept.get((first.kind, last.layer), 0) + buffer.size
    assert kept == {("F", 0): 33, ("X", 0): 63, ("F", 1): 13, ("X", 1): 23}


def test_costs_of_modules_belong_to_the_layers_that_have_them():
    fine = Costs(tuple(LayerCost(name, 1, 1, 1) for name in ("0.a", "1.b", "0.c", "3")))
    costs, spans = by_layer(fine, ["0", "1", "2", "3"])
    assert [layer.name for layer in costs.layers] == ["0.a", "0.c", "1.b", "2", "3"]
    assert spans == [range(2), range(2, 3), range(3, 4), range(4, 5)]
    assert costs.layers[3].forward == 0
    with pytest.raises(ArgumentError, match=r"costs='0\.a': is not of a layer"):
        by_layer(fine, ["x"])


def test_layers_of_no_known_cost_count_as_equal():
    free = Costs((LayerCost("a", 0, 0, 0),) * 6)
    assert [len(run) for run in cut(free, [range(i, i + 1) for i in range(6)], 3)] == [2, 2, 2]
