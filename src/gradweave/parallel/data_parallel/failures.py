"""What DataParallel says when ranks can no longer train together."""

from __future__ import annotations

from contextlib import AbstractContextManager

from gradweave._runtime.peers.contact import lost_contact_as
from gradweave.errors import LostPeerError


def naming_lost_peers(what: str) -> AbstractContextManager[None]:
    """Return a context of messages in which lost contact is a :class:`LostPeerError`.

    Args:
        what: What could not be done, if contact is lost.
    """

    def describe(reason: str) -> LostPeerError:
        return LostPeerError(
            f"{what}: a rank is lost, or has run out of batches before the others; give every rank the same number of "
            f"batches, or start again from a checkpoint: {reason}"
        )

    return lost_contact_as(describe)
