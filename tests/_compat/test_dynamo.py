"""What Dynamo does not trace, and the call before it compiles."""

import logging

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


def test_marks_of_dynamic_sizes_are_set_aside_and_given_back():
    x, plain = torch.ones(4, 2), torch.ones(3)
    torch._dynamo.maybe_mark_dynamic(x, 0)
    marks = dict(vars(x))
    with dynamo.sizes_unmarked(([x], {"y": plain, "n": 3})):
        assert not vars(x)
    assert vars(x) == marks
    assert not vars(plain)


def test_a_message_of_torch_that_says_nothing_of_the_step_is_left_out(caplog):
    log = logging.getLogger("torch._dynamo.metrics_context")
    with dynamo.without_failing_metrics():
        log.error("Unexpected exception logging compilation metrics")
        log.error("something else")
    log.error("Unexpected exception logging compilation metrics")
    assert [record.getMessage() for record in caplog.records] == [
        "something else", "Unexpected exception logging compilation metrics",
    ]  # fmt: skip
