from datetime import timedelta

import pytest

from worlds import World

# The processes stay for all tests: here new ones cost more than the groups that old ones are left with.
OPTIONS = {"timeout": timedelta(seconds=30), "fresh_after": None}


@pytest.fixture(scope="package")
def two(tmp_path_factory):
    """Two ranks."""
    world = World(tmp_path_factory.mktemp("two"), 2, 1, **OPTIONS)
    yield world
    world.close()


@pytest.fixture(scope="package")
def three(tmp_path_factory):
    """Three ranks."""
    world = World(tmp_path_factory.mktemp("three"), 3, 1, **OPTIONS)
    yield world
    world.close()


@pytest.fixture
def fresh(tmp_path):
    """A function that makes worlds, whose processes a test may end."""
    worlds = []

    def make(size, **options):
        worlds.append(World(tmp_path, size, 1, **OPTIONS, **options))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()
