"""Steps that are taken eagerly because they cannot be one graph, and when a graph is tried again."""

from __future__ import annotations

import logging
import re
from collections.abc import Hashable
from dataclasses import dataclass

from gradweave._compat.tracing import DynamoError, TooManyVariantsError
from gradweave._logging import announce

_LOCATION = re.compile(r'File "[^"]+", line \d+')


@dataclass
class _Failures:
    """Failures to make a graph for one kind of batch.

    Attributes:
        count: How many there were.
        steps_left: Steps that are taken eagerly before a graph is tried again.
    """

    count: int = 0
    steps_left: int = 0


class EagerFallback:
    """Kinds of batches for which no graph could be made.

    A graph is tried again after 2, 4, 8, ... steps of the kind, because the obstacle may be gone: the time lost in
    trying is that of a few steps, however long the training.

    Args:
        variants: Number of kinds that are told apart; all others count as one.
    """

    def __init__(self, variants: int) -> None:
        self._variants = variants
        self._failures: dict[Hashable, _Failures] = {}
        self._succeeded: set[Hashable] = set()
        self._has_warned = False

    def count_down(self, kind: Hashable) -> bool:
        """Return whether a step of this kind is to be taken eagerly, without another try, and count it."""
        if not self._failures:
            return False
        failures = self._failures_of(kind)
        if failures is None or failures.steps_left == 0:
            return False
        failures.steps_left -= 1
        return True

    def note_success(self, kind: Hashable) -> None:
        """Note that a step of this kind was taken as a graph."""
        self._succeeded.add(kind)

    def note_failure(self, kind: Hashable) -> None:
        """Note that no graph could be made for a step of this kind."""
        failures = self._failures_of(kind)
        if failures is None:
            failures = self._failures[kind] = _Failures()
        failures.count += 1
        failures.steps_left = 2**failures.count

    def warn(self, reason: str) -> None:
        """Tell the user of the first step that is taken eagerly."""
        if not self._has_warned:
            self._has_warned = True
            announce(f"compile: a step runs eagerly, in stock order: {reason}", level=logging.WARNING)

    def _failures_of(self, kind: Hashable) -> _Failures | None:
        known = self._failures.get(kind)
        if known is None and kind not in self._succeeded and len(self._failures) >= self._variants:
            return self._failures.setdefault(_OTHERS, _Failures())
        return known


_OTHERS = "others"


def reason_of(error: Exception, variants: int) -> str:
    """Return why a step is no graph, in one line, with the file and line that it is about, and what to do."""
    if isinstance(error, TooManyVariantsError):
        return (
            f"variants={variants}: no more graphs are kept, and this batch, or this state of the model or of the "
            "optimizer, needs another one; pad batches to few lengths where they are made, make a Python number that "
            "changes from step to step a tensor, or give a larger variants"
        )
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    locations = _LOCATION.findall(str(error))
    where = f" ({locations[-1]})" if locations else ""
    if isinstance(error, DynamoError):
        return f"loss_fn cannot be made one graph: {lines[0]}{where}; take that out of it to have it compiled"
    kind = "" if type(error).__module__.startswith("gradweave") else f"{type(error).__name__}: "
    return f"{kind}{lines[0]}{where}"
