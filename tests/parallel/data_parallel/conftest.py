import pytest

from worlds import World


@pytest.fixture(scope="package")
def two(tmp_path_factory):
    """Two ranks."""
    world = World(tmp_path_factory.mktemp("two"), 2, 1)
    yield world
    world.close()


@pytest.fixture(scope="package")
def four(tmp_path_factory):
    """Four ranks."""
    world = World(tmp_path_factory.mktemp("four"), 4, 1)
    yield world
    world.close()
