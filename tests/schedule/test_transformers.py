import pytest

from gradweave.schedule import NETWORKS
from gradweave.schedule.transformers import bert_large, gpt

PUBLISHED = {  # GPT-2 and BERT exactly; GPT-3 as its paper rounds
    "gpt2": 124_439_808,
    "gpt2_medium": 354_823_168,
    "gpt2_large": 774_030_080,
    "gpt2_xl": 1_557_611_200,
    "bert_large": 335_141_888,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name):
    assert sum(shape.parameters for shape in NETWORKS[name]()) == PUBLISHED[name]


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
