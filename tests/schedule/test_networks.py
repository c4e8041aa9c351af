import pytest

from gradweave.errors import ArgumentError
from gradweave.schedule import NETWORKS, Hardware, network
from gradweave.schedule.networks import ARITHMETIC_ONLY


@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_has_sound_costs(name):
    costs = network(name, batch=1)
    assert costs.compute_seconds > 0
    assert costs.layers[0].input_grad == 0
    assert len({layer.name for layer in costs.layers}) == len(costs.layers)


def test_time_is_the_longer_of_arithmetic_and_traffic_plus_the_start():
    hardware = Hardware(flops=100.0, bandwidth=10.0, start_seconds=1.0)
    seconds, demand = hardware.cost(multiplies=150, size=5)
    assert seconds == 4.0
    assert (demand.compute, demand.memory) == (0.75, 0.125)
    seconds, demand = hardware.cost(multiplies=0, size=90)
    assert seconds == 10.0
    assert (demand.compute, demand.memory) == (0.0, 0.9)


def test_arithmetic_alone_scales_with_the_batch():
    one, ten = (network("resnet50", batch=batch, hardware=ARITHMETIC_ONLY) for batch in (1, 10))
    for small, large in zip(one.layers, ten.layers, strict=True):
        assert large.forward == pytest.approx(10 * small.forward)
        assert small.weight_grad == small.forward


def test_names_and_batches_are_checked():
    with pytest.raises(ArgumentError, match="network='resnet': use one of uniform, resnet50"):
        network("resnet")
    with pytest.raises(ArgumentError, match="batch=0"):
        network("resnet50", batch=0)
