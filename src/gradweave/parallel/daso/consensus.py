"""Consensus between nodes: whether an exchange counted, and which nodes are still alive.

The store that the process group was made with is the judge: the first verdict written there (by ``compare_set``, which
is atomic) holds, and all nodes read that one. The store lives on one node; if that is lost, nodes can no longer agree,
and all stop.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from statistics import fmean
from threading import Lock, Thread
from typing import Any, Generic, Protocol, TypeVar, get_type_hints

from gradweave._runtime.peers.contact import lost_contact_as
from gradweave.errors import LostPeerError
from gradweave.parallel.daso.rhythm import NOTHING_MEASURED, Figures

T = TypeVar("T")

SOUND, OVERFLOW = -1, -2
"""Values of :attr:`Verdict.broken` besides the index of a node that sent numbers which are not finite."""
_KEPT = 2
"""Exchanges whose votes stay in the store, for late nodes."""
_SHORTEST, _LONGEST = 0.001, 0.02
"""Seconds between two polls of the store."""
_ROLL_CALL = 1.5
"""Timeouts that a roll call takes: a node may hear of a failure a whole timeout later than the others, and may have
begun later than those that heard of it at once."""
_LEAVING = 30.0
"""Most seconds that the store's host waits at the end for ranks that have not read the last verdict."""


class Store(Protocol):
    """The part of a torch.distributed store that is used."""

    def set(self, key: str, value: str) -> None: ...  # noqa: D102
    def get(self, key: str) -> bytes: ...  # noqa: D102
    def add(self, key: str, amount: int) -> int: ...  # noqa: D102
    def check(self, keys: list[str]) -> bool: ...  # noqa: D102
    def wait(self, keys: list[str], timeout: timedelta) -> None: ...  # noqa: D102
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...  # noqa: D102
    def delete_key(self, key: str) -> bool: ...  # noqa: D102


@dataclass(frozen=True)
class Vote:
    """A node's vote at the end of its transfer.

    Attributes:
        arrived: Whether the node has the sum.
        finite: Whether the vectors that it sent were finite.
        holds: Whether the sum is finite.
        contributes: Whether its vectors count in the sum.
        done: Whether it has no batches left.
        steps: Steps that it trained, if it is done.
        state: Number of elements of its optimizer's state.
        figures: Its measurements.
    """

    arrived: bool
    finite: bool = True
    holds: bool = True
    contributes: bool = True
    done: bool = False
    steps: int = 0
    state: int = 0
    figures: Figures = NOTHING_MEASURED


@dataclass(frozen=True)
class Verdict:
    """The outcome of an exchange, the same for all nodes.

    Attributes:
        counted: Whether the exchange took place; if not, the weights of all nodes stay as they are.
        contributing: Number of nodes in the sum.
        done: Whether no node has batches left.
        state: Number of elements of the optimizers' state; -1 if nodes differ.
        broken: Node that sent numbers which are not finite, or ``SOUND``, or ``OVERFLOW``.
        figures: Agreed measurements.
        alive: Nodes that go on; none if the store is lost.
        steps: Most steps of a node that is done.
    """

    counted: bool
    contributing: int = 0
    done: bool = False
    state: int = -1
    broken: int = SOUND
    figures: Figures = NOTHING_MEASURED
    alive: tuple[int, ...] = ()
    steps: int = 0

    @property
    def is_sound(self) -> bool:
        """Whether the sum may be merged."""
        return self.counted and self.broken == SOUND

    @staticmethod
    def of(state: dict[str, Any]) -> Verdict:
        """Return the verdict that ``dataclasses.asdict`` made ``state`` of, directly or by way of JSON."""
        return Verdict(**{**state, "figures": Figures(**state["figures"]), "alive": tuple(state["alive"])})


class VerdictCodec:
    """Verdicts as a fixed count of float64, for the ranks of a node that have no connection to the store.

    The layout follows the fields: those of :class:`Verdict` that are plain numbers, those of its figures, and a flag
    for each node, 1 if it is alive. Every integer in it is far below 2**53, so that float64 is exact.

    Args:
        nodes: Number of nodes at the start.

    Attributes:
        length: Count of numbers.
    """

    _TYPES = get_type_hints(Verdict)
    _NUMBERS = tuple(name for name, kind in _TYPES.items() if kind in (bool, int))
    _FIGURES = tuple(field.name for field in fields(Figures))

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes
        self.length = len(self._NUMBERS) + len(self._FIGURES) + nodes

    def encode(self, verdict: Verdict) -> list[float]:
        """Return a verdict as numbers."""
        numbers = [getattr(verdict, name) for name in self._NUMBERS]
        figures = [getattr(verdict.figures, name) for name in self._FIGURES]
        alive = [node in verdict.alive for node in range(self._nodes)]
        return [float(number) for number in (*numbers, *figures, *alive)]

    def decode(self, encoded: Sequence[float]) -> Verdict:
        """Return the verdict that :meth:`encode` was given."""
        head, tail = len(self._NUMBERS), len(self._NUMBERS) + len(self._FIGURES)
        numbers = {name: self._TYPES[name](n) for name, n in zip(self._NUMBERS, encoded[:head], strict=True)}
        figures = Figures(**dict(zip(self._FIGURES, encoded[head:tail], strict=True)))
        alive = tuple(node for node, flag in enumerate(encoded[tail:]) if flag)
        return Verdict(**numbers, figures=figures, alive=alive)


@dataclass(frozen=True)
class Members:
    """The nodes that take part, and the number of times they have changed."""

    nodes: tuple[int, ...]
    generation: int = 0


class Connections:
    """Connections to the store, one for each thread that talks to it.

    A client of a TCPStore has one socket and one lock: while a thread waits for a key there, every other call on
    that client waits too. A node with two exchanges under way could then not vote on the second before the verdict on
    the first, which may be what the others wait for. So each vote is given a clone of the store.

    Args:
        connect: Return a new connection.
        ready: Connections to make in advance, since making one may take seconds.
    """

    def __init__(self, connect: Callable[[], Store], *, ready: int = 1) -> None:
        self._connect = connect
        self._lock = Lock()
        self._free = [connect() for _ in range(ready)]

    @contextmanager
    def one(self) -> Iterator[Store]:
        """Return a context in which a connection belongs to one thread."""
        with self._lock:
            store = self._free.pop() if self._free else None
        if store is None:
            store = self._connect()
        try:
            yield store
        finally:
            with self._lock:
                self._free.append(store)

    def close(self) -> None:
        """Drop all connections that are not in use."""
        with self._lock:
            self._free.clear()


class Agreement:
    """This node's side of every vote.

    A call may hang for long if the store cannot be reached: make it through :meth:`ask`, on a thread of its own.

    Args:
        stores: Connections to a store that all nodes reach.
        node: Index of this node.
        nodes: Nodes that take part.
        timeout: Seconds to wait for the others.
    """

    def __init__(self, stores: Connections, *, node: int, nodes: Sequence[int], timeout: float) -> None:
        self._stores = stores
        self._node = node
        self._timeout = timeout
        self._threads: list[Thread] = []
        self.members = Members(tuple(nodes))

    @property
    def alive(self) -> tuple[int, ...]:
        """Nodes that take part."""
        return self.members.nodes

    @property
    def patience(self) -> float:
        """Seconds by which a transfer, its vote and a roll call have ended if they ever do."""
        return (2.5 + _ROLL_CALL) * self._timeout

    def vote(self, number: int, vote: Vote, members: Members | None = None) -> Verdict:
        """Vote on an exchange, and return the verdict of all nodes.

        Args:
            number: Number of the exchange.
            vote: This node's vote.
            members: Nodes that took part when it was sent, if they may have changed since: two exchanges may be
                under way, and if both fail, nodes must not call the roll in different generations.
        """
        members = members or self.members
        key = f"exchange/{number}"
        with _naming_lost_host(), self._stores.one() as store:
            store.set(f"{key}/{self._node}", json.dumps(asdict(vote)))
            if not vote.arrived:
                # Without this node's part there is no sum: no need to wait for the other votes.
                _judge(store, key, Verdict(False))
            elif store.add(f"{key}/votes", 1) == len(members.nodes):
                # add() is atomic: exactly one node counts, the last to vote.
                _judge(store, key, _count(store, key, members.nodes))
                _forget(store, number - _KEPT, members.nodes)
            try:
                store.wait([f"{key}/verdict"], timedelta(seconds=self._timeout))
            except RuntimeError:
                _judge(store, key, Verdict(False))
            # Maybe another one than was just proposed: the first that was written.
            verdict = Verdict.of(json.loads(store.get(f"{key}/verdict")))
        if verdict.counted:
            return replace(verdict, alive=members.nodes)
        return Verdict(False, alive=self.roll_call(members=members)[0])

    def use(self, stores: Connections) -> None:
        """Vote through other connections: those to a part of the store without votes."""
        self._stores = stores

    def roll_call(
        self, step: int = 0, *, timeouts: float = _ROLL_CALL, members: Members | None = None
    ) -> tuple[tuple[int, ...], int]:
        """Return the nodes that answer in time, and the latest step among them.

        Args:
            step: This node's step.
            timeouts: Timeouts to wait for the others.
            members: Nodes to call; None for those that take part.
        """
        members = members or self.members
        key = f"generation/{members.generation}"
        with _naming_lost_host(), self._stores.one() as store:
            store.set(f"{key}/{self._node}", str(step))

            def all_here() -> bool:
                return store.check([f"{key}/verdict"]) or store.check([f"{key}/{n}" for n in members.nodes])

            _wait(all_here, timeouts * self._timeout)
            here = [node for node in members.nodes if store.check([f"{key}/{node}"])]
            latest = max(int(store.get(f"{key}/{node}")) for node in here)
            store.compare_set(f"{key}/verdict", "", json.dumps([here, latest]))
            here, latest = json.loads(store.get(f"{key}/verdict"))
        return tuple(here), latest

    def regrouped(self, alive: Sequence[int]) -> None:
        """Continue with these nodes only; called on every rank."""
        self.members = Members(tuple(alive), self.members.generation + 1)

    def leave(self, ranks: int, *, host: bool) -> None:
        """Tell the store's host that this rank no longer needs it; the host waits for all ranks, but not long.

        Args:
            ranks: Number of ranks that take part.
            host: Whether the store may live in this process.
        """
        with suppress(RuntimeError), self._stores.one() as store:
            store.add("left", 1)
            if host:
                _wait(lambda: store.add("left", 0) >= ranks, min(self._timeout, _LEAVING))

    def ask(self, question: Callable[[], T], *, name: str) -> Asked[T]:
        """Ask other nodes a question on a thread of its own, which is :attr:`busy` as long as it runs."""
        asked = Asked(question, patience=self.patience, name=name)
        self._threads = [*self.busy, asked.thread]
        return asked

    @property
    def busy(self) -> list[Thread]:
        """Threads that wait for an answer."""
        return [thread for thread in self._threads if thread.is_alive()]

    def close(self) -> None:
        """Close the connections to the store."""
        self._stores.close()


def _judge(store: Store, key: str, verdict: Verdict) -> None:
    """Write a verdict, unless there is one."""
    store.compare_set(f"{key}/verdict", "", json.dumps(asdict(verdict)))


def _wait(ready: Callable[[], bool], seconds: float) -> bool:
    """Poll the store for a condition that is more than one key; return whether it came true in time."""
    deadline, pause = time.monotonic() + seconds, _SHORTEST
    while not ready():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST)
    return True


def _forget(store: Store, number: int, nodes: Sequence[int]) -> None:
    names = [*map(str, nodes), "votes", "verdict"] if number >= 0 else []
    for name in names:
        # Not every store can delete keys.
        with suppress(RuntimeError):
            store.delete_key(f"exchange/{number}/{name}")


def _count(store: Store, key: str, nodes: Sequence[int]) -> Verdict:
    votes = {node: json.loads(store.get(f"{key}/{node}")) for node in nodes}
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
        steps=max(vote["steps"] for vote in votes.values()),
        figures=Figures(
            # A node that sends early measures its wait for the last one too; the shortest is the transfer itself.
            seconds=_of([f.seconds for f in figures], min),
            compute=_of([f.compute for f in figures], fmean),
            loss=_of([f.loss for f in figures], fmean),
            lr=figures[0].lr,
            work=_of([f.work for f in figures], fmean),
        ),
    )


def _naming_lost_host() -> AbstractContextManager[None]:
    """Return a context that reports lost contact with the store as a lost node: its host."""
    return lost_contact_as(lambda _: LostPeerError("the node that hosts the store cannot be reached"))


class Asked(Generic[T]):
    """A question to other nodes, asked on a thread of its own.

    A call to a store whose host is lost may not return, and cannot be cancelled: the thread is a daemon, which does not
    hold up the end of the program.

    Args:
        question: The call.
        patience: Seconds to wait for its answer.
        name: Name of the thread.
    """

    def __init__(self, question: Callable[[], T], *, patience: float, name: str) -> None:
        self._answer: list[T] = []
        self._error: Exception | None = None
        self._patience = patience

        def ask() -> None:
            try:
                self._answer.append(question())
            except Exception as error:
                self._error = error

        self.thread = Thread(target=ask, name=name, daemon=True)
        self.thread.start()

    def answer(self) -> T:
        """Wait for the answer, for a bounded time; raise what the question raised, or LostPeerError."""
        self.thread.join(self._patience)
        if self._answer:
            return self._answer[0]
        raise self._error or LostPeerError("the node that hosts the store does not answer")


def _of(values: list[float], how: Callable[[list[float]], float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return how(known) if known else math.nan
