from datetime import timedelta

import pytest

from worlds import World

TIMEOUT = timedelta(seconds=30)


@pytest.fixture(scope="package")
def two(tmp_path_factory):
    """Two ranks."""
    world = World(tmp_path_factory.mktemp("two"), 2, 1, timeout=TIMEOUT)
    yield world
    world.close()


@pytest.fixture(scope="package")
def three(tmp_path_factory):
    """Three ranks."""
    world = World(tmp_path_factory.mktemp("three"), 3, 1, timeout=TIMEOUT)
    yield world
    world.close()


@pytest.fixture
def fresh(tmp_path):
    """A function that makes worlds, whose processes a test may end."""
    worlds = []

    def make(size, **options):
        worlds.append(World(tmp_path, size, 1, timeout=TIMEOUT, **options))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()
