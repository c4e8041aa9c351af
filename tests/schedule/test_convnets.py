import pytest

from gradweave.schedule.convnets import densenet121, mobilenet_v3_large, resnet50

PUBLISHED = [  # parameters and multiply-adds as torchvision's documentation gives them
    (resnet50, 25_557_032, 4.09e9),
    (densenet121, 7_978_856, 2.83e9),
    (mobilenet_v3_large, 5_483_032, 0.22e9),
]


@pytest.mark.parametrize(("layers", "parameters", "multiplies"), PUBLISHED)
def test_counts_are_the_published_ones(layers, parameters, multiplies):
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
