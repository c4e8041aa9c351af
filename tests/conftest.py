"""Skips what the machine cannot run, and says why."""

import gc
import importlib.util
import os

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # or each process of the suite has some that import torch

settings.register_profile(
    "gradweave", deadline=None, max_examples=60, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("thorough", parent=settings.get_profile("gradweave"), max_examples=2000, derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "gradweave"))


@pytest.fixture(scope="module", autouse=True)
def older_objects_are_not_garbage() -> None:
    """Collections look at what the tests of a module make: a million objects of modules are older, and stay."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if "gpu" in item.keywords]
    if not marked:
        return
    if importlib.util.find_spec("torch") is not None:
        import torch

        if torch.cuda.is_available():
            return
    for item in marked:
        item.add_marker(pytest.mark.skip(reason="no CUDA device"))
