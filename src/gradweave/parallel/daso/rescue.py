"""What a rank leaves behind where training cannot go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from gradweave.errors import LostPeerError


@contextmanager
def leaving_a_checkpoint(
    path: Path, states: Callable[[], dict[str, Any]], let_go: Callable[[], None]
) -> Iterator[None]:
    """Around what other nodes may be lost in: lets go, saves what this rank has, and says where that is.

    Args:
        path: Of the checkpoint.
        states: What goes into it.
        let_go: Called first, so that nothing more is asked of other ranks.
    """
    try:
        yield
    except LostPeerError as error:
        let_go()
        if error.checkpoint is None:
            # Whatever keeps a checkpoint from being written must not hide why it was to be.
            with suppress(Exception):
                path.parent.mkdir(parents=True, exist_ok=True)
                # A launcher ends the other ranks of a node when the first one ends: what is there must be whole.
                unfinished = path.with_suffix(".unfinished")
                torch.save(states(), unfinished)
                unfinished.replace(path)
                error.checkpoint = str(path)
                error.args = (f"{error} (this rank's checkpoint: {path})",)
        raise
