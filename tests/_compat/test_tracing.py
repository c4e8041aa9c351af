"""Graphs of operations, symbols with guards, and Dynamo's whole functions."""

from collections import deque

import pytest
import torch

from gradweave._compat import tracing

aten = torch.ops.aten


def operations(graph):
    return [node.target for node in graph.graph.nodes if node.op == "call_function"]


def test_a_function_is_recorded_as_the_operations_that_it_runs():
    graph = tracing.trace_to_graph(lambda x: (x + 1).exp())(torch.ones(2))
    assert operations(graph) == [aten.add.Tensor, aten.exp.default]
    assert all(tracing.schema_of(target) is not None for target in operations(graph))
    assert tracing.schema_of("placeholder") is None
    seen = []
    tracing.trace_to_graph(lambda x: (seen.append(tracing.is_traced_to_operations()), x + 1)[1])(torch.ones(1))
    assert seen == [True]
    assert not tracing.is_traced_to_operations()


def test_operations_as_eager_are_not_decomposed():
    def resize(x):
        return torch.nn.functional.interpolate(x, scale_factor=2, mode="bilinear")

    x = torch.ones(1, 1, 2, 2)
    assert aten.upsample_bilinear2d.default in operations(tracing.trace_to_graph(resize, as_eager=True)(x))
    assert aten.upsample_bilinear2d.default not in operations(tracing.trace_to_graph(resize)(x))


def test_a_branch_on_a_symbol_is_guarded():
    mode = tracing.fake_mode()
    lr = tracing.number_symbol(mode, "lr", 0.5)
    names = tracing.names_of([lr])
    assert tracing.is_symbolic(lr)
    assert lr > 0.1
    holds = tracing.guards_of(mode, names)
    assert holds([0.5])
    assert holds([0.2])
    assert not holds([0.05])
    assert tracing.fake_of(mode, torch.ones(3)).shape == (3,)


def test_a_branch_on_data_is_an_error_of_its_own():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    def branch():
        with tracing.as_if_compiling(True), FakeTensorMode(shape_env=ShapeEnv(allow_scalar_outputs=True)):
            assert torch.compiler.is_compiling()
            return bool(torch.ones(1).item() > 0)

    with pytest.raises(tracing.DataDependentError):
        branch()
    assert not torch.compiler.is_compiling()


def test_tracing_that_fails_leaves_autocast_and_modes_as_they_were():
    def fail():
        with tracing.as_it_was():
            torch.set_autocast_enabled("cpu", True)
            assert tracing.is_any_autocast_enabled()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not tracing.is_any_autocast_enabled()


def test_a_function_is_captured_whole_once_for_each_shape_and_freed():
    graphs = []

    def backend(gm, inputs):
        graphs.append(gm)
        return gm.forward

    call, free = tracing.dynamo_compile(lambda x: x + 1, backend, 2)
    for size in (2, 3, 2):
        assert torch.equal(call(torch.ones(size)), torch.full((size,), 2.0))
    assert len(graphs) == 2
    with pytest.raises(tracing.TooManyVariantsError):
        call(torch.ones(4))
    free()
    call(torch.ones(4))
    assert len(graphs) == 3


def test_what_cannot_be_captured_whole_and_errors_of_the_backend():
    call, _ = tracing.dynamo_compile(lambda x: x if x.sum() > 0 else -x, lambda gm, _: gm.forward, 2)
    with pytest.raises(tracing.DynamoError, match=r"test_tracing\.py"):
        call(torch.ones(2))

    def backend(gm, inputs):
        raise ZeroDivisionError

    call, _ = tracing.dynamo_compile(lambda x: x + 1, backend, 2)
    with pytest.raises(ZeroDivisionError):
        call(torch.ones(2))
    kept = deque(maxlen=1)

    def keeps(x):
        kept.append(x + 1)
        kept.append(x + 2)
        return x + 3

    call, _ = tracing.dynamo_compile(keeps, lambda gm, _: gm.forward, 2)
    with pytest.raises(tracing.DynamoError, match="maxlen"):
        call(torch.ones(2))


def test_a_forward_that_recomputes_gives_the_same_bits():
    def forward(x, w):
        return (torch.tanh(x @ w).sin(),)

    inputs = [torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)]
    captured = torch.fx.symbolic_trace(forward)
    made = tracing.rematerialize(captured, inputs, 0.5, decompose=False)
    (y,) = made(*inputs)
    y.sum().backward()
    gradient, inputs[1].grad = inputs[1].grad, None
    (expected,) = forward(*inputs)
    expected.sum().backward()
    assert torch.equal(y, expected)
    assert torch.equal(gradient, inputs[1].grad)
