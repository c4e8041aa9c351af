import pytest

from gradweave._runtime import buckets


@pytest.fixture(autouse=True)
def several_buckets(monkeypatch):
    """Buckets so small that the tests' nets have several of them."""
    monkeypatch.setattr(buckets, "CPU_BUCKET_BYTES", {"forward": 300, "backward": 300})
