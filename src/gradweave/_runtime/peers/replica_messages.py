"""Messages between replicas: the error of ranks that can no longer train together."""

from __future__ import annotations

from contextlib import AbstractContextManager

from gradweave._runtime.peers.contact import lost_contact_as
from gradweave.errors import LostPeerError


def naming_lost_peers(failure: str) -> AbstractContextManager[None]:
    """Return a context of messages in which lost contact is a :class:`LostPeerError`.

    Args:
        failure: What could not be done, as the beginning of a sentence: ``"weights could not be shared"``.
    """

    def describe(reason: str) -> LostPeerError:
        return LostPeerError(
            f"{failure}: a rank is lost, or has run out of batches before the others; give every rank the same number "
            f"of batches, or start again from a checkpoint: {reason}"
        )

    return lost_contact_as(describe)
