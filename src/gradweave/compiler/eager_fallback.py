"""Steps that cannot be one graph: which are taken eagerly, and when a graph is tried again."""

from __future__ import annotations

import logging
import re
from collections.abc import Hashable
from dataclasses import dataclass

from gradweave._compat.tracing import DynamoError, TooManyVariantsError
from gradweave._logging import announce

_PLACE = re.compile(r'File "[^"]+", line \d+')


@dataclass
class _Failures:
    """Of one kind of batch: how many there were, and for how many steps it is not tried again."""

    count: int = 0
    left_out: int = 0


class EagerSteps:
    """What is known of batches for which no graph could be made.

    A graph is tried again after 2, 4, 8, ... steps of the kind, as what was in the way may be gone; so the time that
    is lost in trying is that of a few steps, however long the training.

    Args:
        variants: How many kinds of batches are told apart; all others count as one.
    """

    def __init__(self, variants: int) -> None:
        self._variants = variants
        self._failures: dict[Hashable, _Failures] = {}
        self._worked: set[Hashable] = set()
        self._warned = False

    def is_due(self, kind: Hashable) -> bool:
        """Whether a step of this kind is to be taken eagerly without another try."""
        if not self._failures:
            return False
        failures = self._failures_of(kind)
        if failures is None or failures.left_out == 0:
            return False
        failures.left_out -= 1
        return True

    def worked(self, kind: Hashable) -> None:
        """To be called when a step of this kind was taken as a graph."""
        self._worked.add(kind)

    def failed(self, kind: Hashable) -> None:
        """To be called when no graph could be made for a step of this kind."""
        failures = self._failures_of(kind)
        if failures is None:
            failures = self._failures[kind] = _Failures()
        failures.count += 1
        failures.left_out = 2**failures.count

    def warn(self, reason: str) -> None:
        """Tells the user of the first step that is taken eagerly."""
        if not self._warned:
            self._warned = True
            announce(f"compile: a step runs eagerly, in stock order: {reason}", level=logging.WARNING)

    def _failures_of(self, kind: Hashable) -> _Failures | None:
        known = self._failures.get(kind)
        if known is None and kind not in self._worked and len(self._failures) >= self._variants:
            return self._failures.setdefault(_OTHERS, _Failures())
        return known


_OTHERS = "others"


def reason_of(error: Exception, variants: int) -> str:
    """Why a step is no graph, in one line, with the file and line that it is about, and what to do."""
    if isinstance(error, TooManyVariantsError):
        return (
            f"variants={variants}: no more graphs are kept, and this batch, or this state of the model or of the "
            "optimizer, needs another one; pad batches to few lengths where they are made, make a Python number that "
            "changes from step to step a tensor, or give a larger variants"
        )
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    places = _PLACE.findall(str(error))
    where = f" ({places[-1]})" if places else ""
    if isinstance(error, DynamoError):
        return f"loss_fn cannot be made one graph: {lines[0]}{where}; take that out of it to have it compiled"
    kind = "" if type(error).__module__.startswith("gradweave") else f"{type(error).__name__}: "
    return f"{kind}{lines[0]}{where}"
