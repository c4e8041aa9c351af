"""Processes that begin with torch imported: forked from a server that has done so once, and has no threads."""

import gc
import multiprocessing
import os
from functools import cache
from pathlib import Path

_TESTS = Path(__file__).parent
_IMPORTED = [
    "torch", "torch.distributed", "torch._dynamo", "torch._dynamo.backends.debugging", "torch._functorch.aot_autograd",
    "gradweave", "gradweave.optim", "pytest",
]  # fmt: skip


@cache
def context():
    """The context that processes are started in; what they run must be a function of a module."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(_IMPORTED)
    before = dict(os.environ)
    os.environ |= {"PYTHONPATH": f"{_TESTS.parent / 'src'}:{_TESTS}", "OMP_NUM_THREADS": "1"}
    try:
        from multiprocessing import forkserver

        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ |= before
    return made


class Forked:
    """A process that runs ``target(connection, *arguments)``.

    Args:
        target: A function of a module.
        arguments: What it is called with, behind its end of a pipe.
        environment: Variables that it has besides this process's.
        errors: The file its standard error goes to; by default this process's.
    """

    def __init__(self, target, *arguments, environment=None, errors=None):
        self.connection, there = context().Pipe()
        told = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | (environment or {})
        self._process = context().Process(target=_begin, args=(target, there, arguments, told, errors), daemon=True)
        self._process.start()
        there.close()

    def wait(self, seconds):
        """How it ended, or None if it has not."""
        self._process.join(seconds)
        return self._process.exitcode

    def kill(self):
        """Ends it, and waits until it has ended."""
        self._process.kill()
        self._process.join()
        self.connection.close()


def _begin(target, connection, arguments, environment, errors):
    # What was imported stays: without it a collection takes a second.
    gc.freeze()
    os.environ.update(environment)
    if errors is not None:
        with Path(errors).open("w") as file:
            os.dup2(file.fileno(), 2)
    target(connection, *arguments)
