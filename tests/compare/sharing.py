"""Tests that share one comparison."""

import pytest

together = pytest.mark.xdist_group("comparison")
"""Tests in one process, so that the comparison is made once."""
