"""Ending what DASO holds on to outside of Python: process groups, their threads, and connections to the store."""

from __future__ import annotations

import atexit
from threading import Thread

from gradweave.daso.agreement import Agreement
from gradweave.daso.topology import Groups

_AT_EXIT = 10.0
"""Seconds that the end of the program waits for a transfer that does not end."""


class Held:
    """Groups and store, to be let go of once.

    Threads that are still in a group when the interpreter goes down may bring the process down with it.

    Args:
        groups: Process groups.
    """

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self.agreement: Agreement | None = None

    def end(self) -> None:
        """Lets go: at once, or where a transfer is under way, which would hold up the caller, when that has ended."""
        agreement = self.agreement
        if agreement is None or not agreement.busy:
            self._close()
            return
        later = Thread(target=self._wait_and_close, args=(agreement,), name="gradweave end", daemon=True)
        try:
            later.start()
        except RuntimeError:
            # No more threads are to be had at the end of the program.
            for thread in agreement.busy:
                thread.join(_AT_EXIT)
            return
        atexit.register(later.join, _AT_EXIT)

    def _wait_and_close(self, agreement: Agreement) -> None:
        for thread in agreement.busy:
            thread.join(agreement.patience)
        self._close()

    def _close(self) -> None:
        if self.agreement is not None:
            self.agreement.close()
        self._groups.close()
