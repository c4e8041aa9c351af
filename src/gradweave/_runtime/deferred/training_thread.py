"""Updates that another thread needs than the one that trains."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch


class TrainingThread:
    """Has updates computed as the thread that called ``step()`` would compute them, whichever thread needs them.

    How many threads share a matrix product, on which its last bits depend, is kept by each thread, and set when torch
    does something large there for the first time. So a thread that evaluates must not do an update itself: what it
    computes from then on could differ from what it would have been, and the update from that of the training thread.
    """

    def __init__(self) -> None:
        self._trains: threading.Thread | None = None
        self._in_its_place = 0

    def note(self) -> None:
        """The current thread is the one that trains."""
        self._trains = threading.current_thread()

    def after_fork(self) -> None:
        """A forked process has no thread but the one that forked."""
        self._in_its_place = 0

    @property
    def is_in_its_place(self) -> bool:
        """Whether the current thread works for one that waits for it."""
        return self._in_its_place == threading.get_ident()

    def run(self, work: Callable[[], None]) -> None:
        """Works in the training thread, or in a new thread in its place; one caller at a time."""
        if self.is_in_its_place or threading.current_thread() is self._trains:
            work()
            return
        raised: list[BaseException] = []

        def work_in_its_place() -> None:
            self._in_its_place = threading.get_ident()
            try:
                torch.get_num_threads()  # takes on what set_num_threads() has been given, wherever that was
                work()
            except BaseException as error:  # for the caller
                raised.append(error)
            finally:
                self._in_its_place = 0

        substitute = threading.Thread(target=work_in_its_place, name="gradweave update", daemon=True)
        substitute.start()
        try:
            substitute.join()
        except BaseException:  # an interrupt: the update is not to go on behind the caller's back
            substitute.join()
            raise
        if raised:
            raise raised[0]
