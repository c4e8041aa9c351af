"""Groups are closed once, after the threads that may be inside of them."""

import threading

import pytest

from gradweave._runtime.peers.shutdown import GroupShutdown


class Closes:
    """Notes that it was closed."""

    def __init__(self, name, order):
        self.name, self.order = name, order

    def close(self):
        self.order.append(self.name)


class Talks(Closes):
    """A conversation with a thread that lasts until it is told to end."""

    patience = 5.0

    def __init__(self, order):
        super().__init__("conversation", order)
        self.ends = threading.Event()
        self.thread = threading.Thread(target=self.ends.wait, daemon=True)
        self.thread.start()

    @property
    def busy(self):
        return [self.thread] if self.thread.is_alive() else []


@pytest.fixture
def order():
    return []


def test_without_a_conversation_groups_are_closed_at_once(order):
    GroupShutdown(Closes("groups", order)).end()
    assert order == ["groups"]


def test_the_conversation_is_closed_before_the_groups(order):
    shutdown = GroupShutdown(Closes("groups", order))
    shutdown.conversation = talks = Talks(order)
    talks.ends.set()
    talks.thread.join()
    shutdown.end()
    assert order == ["conversation", "groups"]


def test_a_transfer_that_is_under_way_is_waited_for_in_the_background(order):
    shutdown = GroupShutdown(Closes("groups", order))
    shutdown.conversation = talks = Talks(order)
    shutdown.end()
    assert order == []
    (waiting,) = [thread for thread in threading.enumerate() if thread.name == "gradweave end"]
    talks.ends.set()
    waiting.join(10)
    assert order == ["conversation", "groups"]
