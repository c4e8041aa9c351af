"""The ``gradweave`` command."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

_INTERRUPTED = 130


def main() -> None:
    """Run the command line; Ctrl-C ends it silently, even while it is still loading."""
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default:
        # A KeyboardInterrupt during imports would end in a traceback of this or that library.
        signal.signal(signal.SIGINT, _leave)
    from gradweave.cli.app import main as run

    if is_default:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        run()
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


def _leave(_signal: int, _frame: FrameType | None) -> None:
    os._exit(_INTERRUPTED)


__all__ = ["main"]
