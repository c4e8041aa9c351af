import pytest

from parallel.pipeline.worlds import World


@pytest.fixture(scope="package")
def two(tmp_path_factory):
    """Two ranks."""
    world = World(tmp_path_factory.mktemp("two"))
    yield world
    world.close()


@pytest.fixture(scope="package")
def three(tmp_path_factory):
    """Three ranks."""
    world = World(tmp_path_factory.mktemp("three"), 3)
    yield world
    world.close()


@pytest.fixture
def fresh(tmp_path):
    """Makes worlds that a test may destroy."""
    worlds = []

    def make(size, **options):
        worlds.append(World(tmp_path, size, **options))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()
