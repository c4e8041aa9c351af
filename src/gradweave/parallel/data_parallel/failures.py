"""What is said when ranks can no longer train together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gradweave.errors import GradweaveError


class LostRankError(GradweaveError):
    """A rank did not take part in what all ranks do together."""


@contextmanager
def named(what: str) -> Iterator[None]:
    """Context in which the backend's errors say what could not be done, and what to do."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise LostRankError(
            f"{what}: a rank is lost, or has run out of batches before the others; give every rank the same number of "
            f"batches, or start again from a checkpoint: {str(error).splitlines()[0]}"
        ) from error
