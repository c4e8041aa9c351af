"""What Dynamo does not trace, and the call before it compiles."""

import torch

from gradweave._compat import dynamo


def test_code_outside_of_graphs_runs_as_it_is():
    seen = []

    @dynamo.outside_of_graphs
    def outside(x):
        seen.append(torch.compiler.is_compiling())
        return x

    @dynamo.between_graphs
    def between(x):
        seen.append(torch.compiler.is_compiling())
        return x

    torch.compile(lambda x: between(outside(x) + 1) + 1, backend="eager")(torch.ones(1))
    assert seen == [False, False]


def test_a_callback_hears_of_compiling_once_until_it_is_taken_back():
    heard = []

    def callback(*_):
        heard.append(None)

    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))  # imports Dynamo
    for _ in range(2):
        dynamo.call_before_compiling(callback)
    torch.compile(lambda x: x + 2, backend="eager")(torch.ones(1))
    assert len(heard) == 1
    dynamo.stop_calling_before_compiling(callback)
    dynamo.stop_calling_before_compiling(callback)
    torch.compile(lambda x: x + 3, backend="eager")(torch.ones(1))
    assert len(heard) == 1


def test_code_that_is_not_told_of_compiling():
    with dynamo.not_compiling():
        assert not torch.compiler.is_compiling()
