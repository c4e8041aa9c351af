import pytest

from gradweave.parallel.data_parallel.autotune import Arrangement, simulate
from gradweave.schedule import Link, network
from gradweave.schedule.costs import Costs, LayerCost

PROPOSED = Arrangement(barrier=False, k=3)


def even(layers=20, size=1000):
    return Costs(tuple(LayerCost(str(n), 1e-3, 1e-3, 1e-3, parameter_bytes=size) for n in range(layers)))


def link_for(costs, ratio, replicas=2):
    compute = sum(c.forward + c.input_grad + c.weight_grad + c.update for c in costs.layers)
    sent = sum(c.parameter_bytes for c in costs.layers)
    return Link(2 * (replicas - 1) / replicas * sent / (ratio * compute))


@pytest.mark.parametrize(
    ("ratio", "least", "most"), [(0.3, 1.0, 1.01), (0.75, 1.05, 1.12), (0.9, 1.2, 1.27), (1.0, 1.2, 1.3)]
)
def test_resnet50_gains_where_communication_is_near_computation(ratio, least, most):
    costs = network("resnet50")
    even_costs = Costs(tuple(LayerCost(c.name, 1.0, 1.0, 1.0, parameter_bytes=c.parameter_bytes) for c in costs.layers))
    prediction, _ = simulate(even_costs, link_for(even_costs, ratio), 2, 1, None)
    assert prediction.ratio == pytest.approx(ratio)
    assert least <= prediction.stock / prediction.best <= most


def test_k_is_the_one_given():
    prediction, _ = simulate(even(), link_for(even(), 1.0), 2, 1, None, k=7)
    assert prediction.arrangement == Arrangement(barrier=False, k=7)
