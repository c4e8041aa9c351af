"""Forwards whose layers are watched together, in Triton's interpreter, in a process of its own."""

import pytest

from optim.test_fused import HERE, run

pytest.importorskip("triton")


@pytest.mark.timeout(600)
def test_layers_that_are_watched_together_catch_what_each_would_by_itself():
    failure = run(["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(HERE / "forwards_cases.py")],
                  TRITON_INTERPRET="1")  # fmt: skip
    assert not failure, failure
