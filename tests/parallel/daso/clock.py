"""Timeouts without the time: a wait for a node ends once the node is known to be gone, and no earlier."""

import os
import signal
import time
from contextlib import contextmanager
from unittest import mock

from gradweave._compat.distributed import default_store, part_of_default_store
from gradweave.parallel.daso import api


class Clockless:
    """A store on which a wait times out as soon as all nodes have come but those that are gone.

    Args:
        store: The real store.
        gone: Return whether a node is gone.
        members: Return the nodes that take part at present.
    """

    def __init__(self, store, gone, members):
        self._store, self._gone, self._members = store, gone, members

    def __getattr__(self, name):
        return getattr(self._store, name)

    def check(self, keys):
        # Several keys are a roll call, one is a question about a single node.
        awaited = [key for key in keys if not self._gone(int(key.rpartition("/")[2]))] if len(keys) > 1 else keys
        return self._store.check(awaited)

    def wait(self, keys, timeout):
        exchange, ends = keys[0].rpartition("/")[0], time.monotonic() + timeout.total_seconds()
        while not self._store.check(keys):
            silent = [node for node in self._members() if not self._store.check([f"{exchange}/{node}"])]
            if any(map(self._gone, silent)) or time.monotonic() > ends:
                raise RuntimeError("timeout")
            time.sleep(0.005)


@contextmanager
def without_a_clock():
    """Context in which a DASO is made whose timeouts take no time; yields a function to be told of it."""
    made = []

    def members():
        return made[0]._agreement.members.nodes if made else ()

    def part(name):
        return Clockless(part_of_default_store(name), is_gone, members)

    with mock.patch.object(api, "part_of_default_store", part):
        yield made.append


def leave_for_good(node):
    """Announce that a node will no longer answer, or not in time."""
    default_store().set(f"gone/{node}", "")


def die_as(node):
    """Kill this process."""
    leave_for_good(node)
    os.kill(os.getpid(), signal.SIGKILL)


def is_gone(node):
    return default_store().check([f"gone/{node}"])
