import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradweave.parallel.daso.flat_buffers import Layout, Pool
from gradweave.parallel.daso.merge_rules import DeltaRule, PaperRule


@given(st.integers(2, 5), st.integers(1, 20), st.sampled_from([None, torch.bfloat16]), st.integers(0, 2**31))
def test_no_progress_is_lost_whatever_nodes_do_meanwhile(nodes, rounds, dtype, seed):
    """The mean of all nodes moves only by what they themselves do; what rounding leaves is sent later."""
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.zeros(8, dtype=torch.float64) for _ in range(nodes)]
    layouts, rules = [Layout([w]) for w in weights], [DeltaRule() for _ in range(nodes)]
    for layout, rule in zip(layouts, rules, strict=True):
        rule.agree(layout)
    mean, pool = torch.zeros(8, dtype=torch.float64), Pool()
    for _ in range(rounds):
        sent = [pool.copy(rule.payload(layout, pool), dtype) for layout, rule in zip(layouts, rules, strict=True)]
        for w in weights:
            moved = torch.randn(8, dtype=torch.float64, generator=generator)
            w += moved
            mean += moved / nodes
        total = [sum(s[0].double() for s in sent)]
        for layout, rule, own in zip(layouts, rules, sent, strict=True):
            rule.merge(layout, own, total, nodes, 1, pool)
        assert torch.allclose(sum(weights) / nodes, mean, atol=1e-9)
        assert all(torch.equal(rule.anchor[0], rules[0].anchor[0]) for rule in rules)


@pytest.mark.parametrize(("staleness", "expected"), [(1, 3.0), (4, 2.4), (0, 10 / 3), (None, 4.0)])
def test_the_published_merge(staleness, expected):
    x = torch.full((2,), 2.0)
    layout = Layout([x])
    PaperRule().merge(layout, [], [torch.full((2,), 8.0)], 2, staleness, Pool())
    assert x.tolist() == pytest.approx([expected] * 2)


def test_weights_that_come_in_later():
    old, new = torch.ones(2), torch.full((2,), 5.0)
    layout, rule = Layout([old]), DeltaRule()
    rule.agree(layout)
    old += 1
    sent = rule.payload(layout, Pool())
    first = layout.first(1)
    layout.extend([new])
    rule.extend(layout)
    rule.merge(first, sent, [torch.full((2,), 4.0)], 2, 1, Pool())
    assert old.tolist() == [3, 3]
    assert new.tolist() == [5, 5]
    assert rule.anchor[0].tolist() == [3, 3, 5, 5]
    assert rule.payload(layout, Pool())[0].tolist() == [0, 0, 0, 0]
