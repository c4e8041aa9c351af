"""How nodes agree: whether an exchange counted, and who is still there.

The store that the process group was made with is the judge: the first verdict written there holds, and
everyone reads that one. It lives on one node; where that is lost, nobody can agree and everybody stops.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from statistics import fmean
from threading import Thread
from typing import Generic, Protocol, TypeVar

from gradweave.daso.rhythm import NOTHING_MEASURED, Figures
from gradweave.errors import LostNodeError

T = TypeVar("T")

SOUND, OVERFLOW = -1, -2
"""Instead of the number of a node that sent numbers which are not finite."""
_KEPT = 2
"""Exchanges whose votes stay in the store, for those that are late."""
_SHORTEST, _LONGEST = 0.001, 0.02
_ROLL_CALL = 1.5
"""Timeouts that a roll call takes: who waits for a third node hears nothing of the one that is lost for a whole
timeout, and may have begun later than those that heard of it at once."""


class Store(Protocol):
    """What is used of a torch.distributed store."""

    def set(self, key: str, value: str) -> None: ...  # noqa: D102
    def get(self, key: str) -> bytes: ...  # noqa: D102
    def add(self, key: str, amount: int) -> int: ...  # noqa: D102
    def check(self, keys: list[str]) -> bool: ...  # noqa: D102
    def wait(self, keys: list[str], timeout: timedelta) -> None: ...  # noqa: D102
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...  # noqa: D102
    def delete_key(self, key: str) -> bool: ...  # noqa: D102


@dataclass(frozen=True)
class Vote:
    """What a node says when its transfer has ended.

    Attributes:
        arrived: Whether it has the sum.
        finite: Whether what it sent was.
        holds: Whether the sum still is.
        contributes: Whether what it sent counts.
        done: Whether it has trained all its batches.
        state: Size of its optimizer's state.
        figures: What it measured.
    """

    arrived: bool
    finite: bool = True
    holds: bool = True
    contributes: bool = True
    done: bool = False
    state: int = 0
    figures: Figures = NOTHING_MEASURED


@dataclass(frozen=True)
class Verdict:
    """What holds for all nodes.

    Attributes:
        counted: Whether the exchange took place; if not, everybody's weights stay as they are.
        contributing: How many nodes the sum is of.
        done: Whether no node has batches left.
        state: Size of the optimizers' state; -1 where they differ.
        broken: Node that sent numbers which are not finite, or ``SOUND``, or ``OVERFLOW``.
        figures: Agreed measurements.
        alive: Nodes that go on.
    """

    counted: bool
    contributing: int = 0
    done: bool = False
    state: int = -1
    broken: int = SOUND
    figures: Figures = NOTHING_MEASURED
    alive: tuple[int, ...] = ()

    @property
    def sound(self) -> bool:
        """Whether the sum may be merged."""
        return self.counted and self.broken == SOUND

    def as_list(self) -> list[float]:
        """As numbers, for ranks that do not speak with the store."""
        f = self.figures
        head = [self.counted, self.contributing, self.done, self.state, self.broken]
        return [float(x) for x in (*head, f.seconds, f.compute, f.loss, f.lr, f.work, *self.alive)]

    @staticmethod
    def from_list(numbers: Sequence[float]) -> Verdict:
        """The inverse of :meth:`as_list`; negative numbers at the end are padding."""
        counted, contributing, done, state, broken, seconds, compute, loss, lr, work, *alive = numbers
        figures = Figures(seconds, compute, loss, lr, work)
        nodes = tuple(int(node) for node in alive if node >= 0)
        return Verdict(bool(counted), int(contributing), bool(done), int(state), int(broken), figures, nodes)


class Agreement:
    """This node's side of every vote.

    Where the store cannot be reached, a call here may hang for long: make it on a thread of its own, and
    wait for that no longer than :attr:`patience`.

    Args:
        store: That all nodes reach.
        node: Index of this node.
        nodes: Those that take part.
        timeout: Seconds to wait for the others.
    """

    def __init__(self, store: Store, *, node: int, nodes: Sequence[int], timeout: float) -> None:
        self._store = store
        self._node = node
        self._timeout = timeout
        self.alive = tuple(nodes)
        self._generation = 0

    @property
    def patience(self) -> float:
        """Seconds after which a transfer, its vote and a roll call have ended if they ever do."""
        return (2.5 + _ROLL_CALL) * self._timeout

    def vote(self, number: int, vote: Vote) -> Verdict:
        """Says how exchange ``number`` ended here, and returns what holds for all."""
        key = f"exchange/{number}"
        with _lost_store():
            self._store.set(f"{key}/{self._node}", json.dumps(asdict(vote)))
            if not vote.arrived:
                self._judge(key, Verdict(False))
            elif self._store.add(f"{key}/votes", 1) == len(self.alive):
                self._judge(key, self._count(key))
                self._forget(number - _KEPT)
            try:
                self._store.wait([f"{key}/verdict"], timedelta(seconds=self._timeout))
            except RuntimeError:
                self._judge(key, Verdict(False))
            verdict = json.loads(self._store.get(f"{key}/verdict"))
        verdict["figures"] = Figures(**verdict["figures"])
        counted = Verdict(**{**verdict, "alive": self.alive})
        return counted if counted.counted else Verdict(False, alive=self.roll_call()[0])

    def _count(self, key: str) -> Verdict:
        votes = {node: json.loads(self._store.get(f"{key}/{node}")) for node in self.alive}
        figures = [Figures(**vote["figures"]) for vote in votes.values()]
        states = {vote["state"] for vote in votes.values()}
        broken = [node for node, vote in votes.items() if not vote["finite"]]
        if not broken and not all(vote["holds"] for vote in votes.values()):
            broken = [OVERFLOW]
        return Verdict(
            counted=True,
            contributing=sum(vote["contributes"] for vote in votes.values()),
            done=all(vote["done"] for vote in votes.values()),
            state=states.pop() if len(states) == 1 else -1,
            broken=broken[0] if broken else SOUND,
            figures=Figures(
                # A node that sends early also waits for the last one; what that one sees is the transfer.
                seconds=_of([f.seconds for f in figures], min),
                compute=_of([f.compute for f in figures], fmean),
                loss=_of([f.loss for f in figures], fmean),
                lr=figures[0].lr,
                work=_of([f.work for f in figures], fmean),
            ),
        )

    def use(self, store: Store) -> None:
        """Votes from now on where nobody has voted yet."""
        self._store = store

    def roll_call(self, step: int = 0, *, timeouts: float = _ROLL_CALL) -> tuple[tuple[int, ...], int]:
        """Finds out which nodes are still there, those that answer in time, and the latest step one of them is at."""
        key = f"generation/{self._generation}"
        with _lost_store():
            self._store.set(f"{key}/{self._node}", str(step))

            def all_here() -> bool:
                return self._store.check([f"{key}/verdict"]) or self._store.check([f"{key}/{n}" for n in self.alive])

            self._wait(all_here, timeouts)
            here = [node for node in self.alive if self._store.check([f"{key}/{node}"])]
            latest = max(int(self._store.get(f"{key}/{node}")) for node in here)
            self._store.compare_set(f"{key}/verdict", "", json.dumps([here, latest]))
            here, latest = json.loads(self._store.get(f"{key}/verdict"))
        return tuple(here), latest

    def regrouped(self, alive: Sequence[int]) -> None:
        """Told, on every rank, that from now on these nodes take part."""
        self.alive = tuple(alive)
        self._generation += 1

    def _judge(self, key: str, verdict: Verdict) -> None:
        self._store.compare_set(f"{key}/verdict", "", json.dumps(asdict(verdict)))

    def _wait(self, ready: Callable[[], bool], timeouts: float) -> bool:
        """Polls, for what no single key tells."""
        deadline, pause = time.monotonic() + timeouts * self._timeout, _SHORTEST
        while not ready():
            if time.monotonic() > deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
        return True

    def _forget(self, number: int) -> None:
        names = [*map(str, self.alive), "votes", "verdict"] if number >= 0 else []
        for name in names:
            # Not every store can delete.
            with suppress(RuntimeError):
                self._store.delete_key(f"exchange/{number}/{name}")


@contextmanager
def _lost_store() -> Iterator[None]:
    """Says what it means when the store is gone."""
    try:
        yield
    except RuntimeError as error:
        raise LostNodeError("the node that hosts the store cannot be reached") from error


class Asked(Generic[T]):
    """A question to other nodes, asked on a thread of its own."""

    def __init__(self, question: Callable[[], T], *, patience: float, name: str) -> None:
        self._answer: list[T] = []
        self._error: Exception | None = None
        self._patience = patience

        def ask() -> None:
            try:
                self._answer.append(question())
            except Exception as error:
                self._error = error

        self._thread = Thread(target=ask, name=name, daemon=True)
        self._thread.start()

    def answer(self) -> T:
        """Waits for it, but not for ever."""
        self._thread.join(self._patience)
        if self._answer:
            return self._answer[0]
        raise self._error or LostNodeError("the node that hosts the store does not answer")


def _of(values: list[float], how: Callable[[list[float]], float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return how(known) if known else math.nan
