import pytest

from gradweave.errors import ArgumentError
from gradweave.schedule import NETWORKS, Hardware, network
from gradweave.schedule.networks import (
    ARITHMETIC_ONLY,
    LayerShape,
    bert_large,
    densenet121,
    gpt,
    mobilenet_v3_large,
    resnet50,
)


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


CONVOLUTIONAL = [  # parameters and multiply-adds, from torchvision's documentation
    (resnet50, 25_557_032, 4.09e9),
    (densenet121, 7_978_856, 2.83e9),
    (mobilenet_v3_large, 5_483_032, 0.22e9),
]


@pytest.mark.parametrize(("layers", "parameters", "multiplies"), CONVOLUTIONAL)
def test_counts_of_convolutional_networks_are_the_published_ones(layers, parameters, multiplies):
    shapes = layers()
    assert sum(shape.parameters for shape in shapes) == parameters
    assert sum(shape.multiplies for shape in shapes) == pytest.approx(multiplies, rel=0.02)


def test_blocks_are_contiguous():
    for layers in (resnet50, densenet121, mobilenet_v3_large):
        blocks = [shape.block for shape in layers()]
        runs = [block for i, block in enumerate(blocks) if i == 0 or blocks[i - 1] != block]
        assert len(runs) == len(set(runs))


def test_depthwise_convolutions_are_cheap():
    depthwise = [shape for shape in mobilenet_v3_large() if shape.name.endswith("depthwise")]
    assert len(depthwise) == 15
    assert depthwise[0].multiplies == 16 * 9 * 112 * 112


TRANSFORMERS = {  # GPT-2 and BERT exactly; GPT-3 as its paper rounds
    "gpt2": 124_439_808,
    "gpt2_medium": 354_823_168,
    "gpt2_large": 774_030_080,
    "gpt2_xl": 1_557_611_200,
    "bert_large": 335_141_888,
}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_parameters_of_transformers_are_the_published_ones(name):
    assert sum(shape.parameters for shape in NETWORKS[name]()) == TRANSFORMERS[name]


@pytest.mark.parametrize(
    ("name", "billions"),
    [("gpt3_1.3b", 1.3), ("gpt3_2.7b", 2.7), ("gpt3_6.7b", 6.7), ("gpt3_13b", 13), ("gpt3_175b", 175)],
)
def test_gpt3_sizes_are_as_named(name, billions):
    assert sum(shape.parameters for shape in NETWORKS[name]()) / 1e9 == pytest.approx(billions, rel=0.03)


def test_multiplies_are_parameters_times_tokens_plus_attention():
    tokens, width, blocks = 64, 32, 3
    layers = gpt(blocks, width, tokens, vocabulary=100)
    assert sum(shape.multiplies for shape in layers) == tokens * (blocks * 12 * width * width + width * 100)
    assert sum(shape.extra_multiplies for shape in layers) == blocks * 2 * tokens * tokens * width


def test_bert_has_a_pooler_on_one_token():
    assert bert_large()[-1].multiplies == 1024 * 1024


def test_a_layer_without_weightless_work_beside_it_is_the_default():
    assert LayerShape("fc", "head", 6, 2, 3, 9).extra_multiplies == 0
