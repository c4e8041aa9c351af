import pytest

from worlds import World


@pytest.fixture(scope="package")
def two_by_two(tmp_path_factory):
    """Two nodes of two ranks."""
    world = World(tmp_path_factory.mktemp("world"))
    yield world
    world.close()
