"""Updates that are needed in another thread than the training thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch


class TrainingThread:
    """Runs updates as the thread that called ``step()`` would run them, whichever thread needs them.

    Each thread has its own number of threads that share an operation, on which the last bits of matrix products
    depend; it is set when torch first runs a large operation there. So a thread that evaluates must not run an update:
    the update could differ from the training thread's, and so could the results of that thread from then on.
    """

    def __init__(self) -> None:
        self._trainer: threading.Thread | None = None
        self._substitute = 0

    def note(self) -> None:
        """Record the current thread as the training thread."""
        self._trainer = threading.current_thread()

    def after_fork(self) -> None:
        """Forget the substitute: a forked process has only the thread that forked."""
        self._substitute = 0

    @property
    def is_substitute(self) -> bool:
        """Whether the current thread runs work for another one that waits for it."""
        return self._substitute == threading.get_ident()

    def run(self, work: Callable[[], None]) -> None:
        """Run work here if this is the training thread, or else in a new thread; one caller at a time."""
        if self.is_substitute or threading.current_thread() is self._trainer:
            work()
            return
        raised: list[BaseException] = []

        def work_as_substitute() -> None:
            self._substitute = threading.get_ident()
            try:
                torch.get_num_threads()  # initialises this thread's number from set_num_threads(), called anywhere
                work()
            except BaseException as error:  # raised again in the caller
                raised.append(error)
            finally:
                self._substitute = 0

        substitute = threading.Thread(target=work_as_substitute, name="gradweave update", daemon=True)
        substitute.start()
        try:
            substitute.join()
        except BaseException:  # an interrupt must not leave the update running
            substitute.join()
            raise
        if raised:
            raise raised[0]
