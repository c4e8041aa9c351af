"""What everything that attaches to a training loop has in common: one way to let go, and one to ask what is done."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self


class Attachment(ABC):
    """A hold on a model, an optimizer or both, under the loop that their user keeps.

    Entering it as a context manager does nothing, since constructing it has attached it; leaving detaches. After
    :meth:`detach`, which may be called twice, the loop is stock again.
    """

    @property
    @abstractmethod
    def is_attached(self) -> bool:
        """Whether the attachment is in force: it is until :meth:`detach`."""

    @abstractmethod
    def detach(self) -> Any:
        """Finish what is pending, and let go."""

    @abstractmethod
    def explain(self) -> str:
        """Return what is done, and why, in a line or a few."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()


class AccumulatingAttachment(Attachment):
    """An attachment that acts in backward, and must be told of micro-batches."""

    @abstractmethod
    def no_update(self) -> AbstractContextManager[None]:
        """Return a context in which backwards only accumulate: for all micro-batches of a step but the last."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Return :meth:`no_update`, under the name that it has in DistributedDataParallel."""
        return self.no_update()
