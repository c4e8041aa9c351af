"""Ending what DASO holds on to outside of Python: process groups, their threads, and connections to the store."""

from __future__ import annotations

import atexit
from threading import Thread, main_thread
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradweave.parallel.daso.consensus import Agreement
    from gradweave.parallel.daso.topology import Groups

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
        if not main_thread().is_alive():
            # The program is at its end, and does not wait for threads that begin now.
            self._wait_and_close(agreement, _AT_EXIT)
            return
        later = Thread(target=self._wait_and_close, args=(agreement, agreement.patience), daemon=True)
        later.name = "gradweave end"
        later.start()
        atexit.register(later.join, _AT_EXIT)

    def _wait_and_close(self, agreement: Agreement, seconds: float) -> None:
        for thread in agreement.busy:
            thread.join(seconds)
        if not agreement.busy:
            self._close()

    def _close(self) -> None:
        if self.agreement is not None:
            self.agreement.close()
        self._groups.close()
