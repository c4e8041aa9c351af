import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradweave.parallel.daso.flat_buffers import Layout, Pool

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128]


@st.composite
def tensors(draw):
    shapes = st.lists(st.integers(0, 4), max_size=3)
    made = [torch.randn(draw(shapes), dtype=draw(st.sampled_from(DTYPES))) for _ in range(draw(st.integers(0, 6)))]
    return [t.transpose(0, -1) if t.dim() > 1 and draw(st.booleans()) else t for t in made]


@given(tensors(), st.integers(0, 6))
def test_packing_and_storing_are_inverse_and_growing_keeps_beginnings(made, count):
    layout = Layout(made[:count])
    before = layout.pack()
    layout.extend(made)
    vectors = layout.pack()
    for old, new in zip(before, vectors, strict=False):
        assert torch.equal(new[: len(old)], old)
    kept = [t.clone() for t in made]
    for t in made:
        t.zero_()
    layout.store(vectors)
    assert all(torch.equal(a, b) for a, b in zip(made, kept, strict=True))
    layout.add([torch.ones_like(v) for v in vectors])
    for a, b in zip(made, kept, strict=True):
        one = torch.complex(torch.tensor(1.0), torch.tensor(1.0)) if a.is_complex() else 1
        assert torch.equal(a, (b + one).to(a.dtype))


def test_whole_numbers_stay_out_and_twice_is_once():
    t = torch.ones(3)
    layout = Layout([t, torch.arange(3), t])
    assert layout.numel == 3
    assert not layout.extend([t])


def test_missing_tensors_are_zeros():
    layout, pool = Layout([torch.ones(2), torch.ones(3)]), Pool()
    for _ in range(2):
        (vector,) = layout.pack([None, torch.full((3,), 2.0)], pool=pool)
        assert vector.tolist() == [0, 0, 2, 2, 2]
        pool.give([vector.fill_(7.0)])
    with pytest.raises(ValueError, match="zip"):
        layout.pack([None])


def test_a_pool_gives_what_it_was_given_and_never_twice():
    pool = Pool()
    (half,) = pool.copy([torch.ones(4)], torch.bfloat16)
    assert (half.dtype, half.tolist()) == (torch.bfloat16, [1.0] * 4)
    pool.give([half])
    (again,), (other,) = pool.copy([torch.zeros(4)], torch.bfloat16), pool.copy([torch.zeros(4)], torch.bfloat16)
    assert again.data_ptr() == half.data_ptr() != other.data_ptr()
