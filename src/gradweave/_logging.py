"""Messages to the user: through one logger, on one rank, once each."""

from __future__ import annotations

import logging
import os
from functools import cache

logger = logging.getLogger("gradweave")
"""Silent until the application configures logging, as usual for libraries."""


def announce(message: str, *, level: int = logging.INFO) -> None:
    """Log a message the first time it is given in this process, on rank 0 only.

    The rank is ``RANK`` of the environment, as set by torchrun; without it, this process is rank 0.
    """
    if _is_first_rank():
        _log_once(message, level)


def report(message: str) -> None:
    """Log the progress of a long task, every time, on rank 0 only."""
    if _is_first_rank():
        logger.info(message)


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


@cache
def _log_once(message: str, level: int) -> None:
    logger.log(level, message)
