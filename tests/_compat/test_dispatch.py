"""Every operation is told, before or after it runs, in forward and backward."""

import torch

from gradweave._compat.dispatch import EveryCall, EveryResult

aten = torch.ops.aten


def test_operations_are_told_in_order_with_arguments_and_results():
    x, before, after = torch.ones(2, requires_grad=True), [], []
    with (
        EveryCall(lambda func, *_: before.append(func)),
        EveryResult(lambda func, *told: after.append((func, told[-1]))),
    ):
        (2 * x).exp().sum().backward()
    named = [func for func in before if func in (aten.mul.Tensor, aten.exp.default, aten.sum.default)]
    assert named[:3] == [aten.mul.Tensor, aten.exp.default, aten.sum.default]
    assert [func for func, _ in after] == before
    assert named.count(aten.mul.Tensor) == 3, "the backward's operations too"
    assert torch.equal(after[0][1], 2 * torch.ones(2))
