from gradweave.cli import names
from gradweave.compare.variants import MODES, OPTIMIZERS
from gradweave.compare.workloads import WORKLOADS


def test_names_that_help_texts_list_are_the_real_ones():
    assert tuple(WORKLOADS) == names.MODELS
    assert tuple(OPTIMIZERS) == names.OPTIMIZERS
    assert tuple(MODES) == names.MODES
