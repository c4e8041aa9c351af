"""The end of process groups and of connections to the store, at a time when no thread is inside of them."""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from threading import Thread, main_thread
from typing import Protocol

_AT_EXIT = 10.0
"""Seconds that the end of the program waits for a transfer that does not end."""


class Closable(Protocol):
    """What is closed once: the groups of this rank."""

    def close(self) -> None: ...


class Conversation(Closable, Protocol):
    """Threads that talk to other ranks, over connections of their own."""

    @property
    def busy(self) -> Sequence[Thread]:
        """Threads that still talk."""

    @property
    def patience(self) -> float:
        """Seconds after which they have ended if they ever do."""


class GroupShutdown:
    """Closes a rank's groups, and its connections to the store, once.

    A group is closed while the default group and the interpreter are still there: a thread that is still in a group of
    Gloo's when the interpreter goes down may bring the process down with it. Hence a ``weakref.finalize`` of the owner,
    and not ``__del__``, is to call :meth:`end`: it runs at exit too, before modules are torn down.

    Args:
        groups: Process groups.

    Attributes:
        conversation: With other ranks, as soon as there is one; it is closed before the groups that it may be using.
    """

    def __init__(self, groups: Closable) -> None:
        self._groups = groups
        self.conversation: Conversation | None = None

    def end(self) -> None:
        """Close all at once, or, if a transfer is under way, from a thread that waits for it in the caller's place."""
        conversation = self.conversation
        if conversation is None or not conversation.busy:
            self._close()
            return
        if not main_thread().is_alive():
            # The interpreter is going down: it does not wait for a thread that starts now.
            self._wait_and_close(conversation, _AT_EXIT)
            return
        later = Thread(target=self._wait_and_close, args=(conversation, conversation.patience), daemon=True)
        later.name = "gradweave end"
        later.start()
        # A daemon thread would be frozen inside of the group at exit: give it a while.
        atexit.register(later.join, _AT_EXIT)

    def _wait_and_close(self, conversation: Conversation, seconds: float) -> None:
        for thread in conversation.busy:
            thread.join(seconds)
        # Closing a group waits for what is under way in it. Where that never ends, the end of the process closes it.
        if not conversation.busy:
            self._close()

    def _close(self) -> None:
        if self.conversation is not None:
            self.conversation.close()
        self._groups.close()
