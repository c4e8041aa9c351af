"""Checkpoints: DASO's state with an exchange under way, and the file that a rank leaves when it has to stop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradweave.errors import LostPeerError, UnsupportedError
from gradweave.parallel.daso.consensus import Verdict
from gradweave.parallel.daso.exchange import COUNTERS, Exchange, Flight
from gradweave.parallel.daso.flat_buffers import Layout
from gradweave.parallel.daso.topology import Groups, Topology

_VERSION = 1


def save(exchange: Exchange, topology: Topology, params: list[torch.Tensor], weights: Layout) -> dict[str, Any]:
    """Return the state; wait for a transfer that this rank carries, but do not merge it.

    Args:
        exchange: Whose counters and whose exchange under way.
        topology: The nodes that the state belongs to.
        params: All parameters, trained or not.
        weights: Trained parameters.
    """
    places = {id(p): place for place, p in enumerate(params)}
    return {
        "version": _VERSION,
        "ranks": [list(members) for members in topology.ranks],
        "rank": topology.rank,
        "checksum": checksum(params),
        "weights": [places[id(p)] for p in weights.tensors if id(p) in places],
        "exchange": exchange.state(),
        "flight": None if exchange.flight is None else _flight_state(exchange.flight),
    }


def _flight_state(flight: Flight) -> dict[str, Any]:
    total, verdict = flight.total, flight.verdict
    if flight.transfer is not None:
        total, verdict = flight.transfer.total, flight.transfer.result()
    kept = {name: getattr(flight, name) for name in ("number", "place", "sent_at", "due", "staleness", "weights")}
    return {
        **kept,
        "sent": [vector.clone() for vector in flight.sent],
        "total": None if total is None else [vector.clone() for vector in total],
        "verdict": None if verdict is None else asdict(verdict),
    }


def is_own_state(state: dict[str, Any], topology: Topology, groups: Groups) -> bool:
    """Return whether every rank has loaded its own state, of the same nodes and the same step; all must call it.

    Raises:
        UnsupportedError: If it is not a state of DASO, or one of another version.
    """
    if state.get("version") != _VERSION:
        raise UnsupportedError(
            "the state", f"it is not a state of DASO of version {_VERSION}", "give what daso.state_dict() returned"
        )
    own = state["ranks"] == [list(members) for members in topology.ranks] and state["rank"] == topology.rank
    if groups.everyone is None:
        return bool(own)
    answers: list[Any] = [None] * dist.get_world_size(groups.everyone)
    counters = [state["steps"], state["pending"], *(state["exchange"][name] for name in COUNTERS)]
    dist.all_gather_object(answers, (own, counters), group=groups.everyone)
    return all(answer == (True, answers[0][1]) for answer in answers)


def load(exchange: Exchange, state: dict[str, Any], params: list[torch.Tensor], weights: Layout) -> None:
    """Restore what :func:`save` returned, with the exchange under way."""
    weights.replace(params[place] for place in state["weights"])
    exchange.restore(state["exchange"])
    saved, exchange.flight = state["flight"], None
    if saved is not None:
        device = params[0].device
        vectors = {
            name: None if saved[name] is None else [v.to(device, copy=True) for v in saved[name]]
            for name in ("sent", "total")
        }
        verdict = None if saved["verdict"] is None else Verdict.of(saved["verdict"])
        exchange.flight = Flight(**{**saved, **vectors, "verdict": verdict})


def load_on_other_nodes(exchange: Exchange, state: dict[str, Any], params: list[torch.Tensor], weights: Layout) -> None:
    """Restore on other nodes what :func:`save` returned: merge what had arrived, and drop what had not."""
    load(exchange, state, params, weights)
    flight, exchange.flight = exchange.flight, None
    if flight is not None and flight.total is not None and flight.verdict is not None and flight.verdict.is_sound:
        exchange.apply(flight, flight.verdict, flight.total)


def check_weights(state: dict[str, Any], params: Iterable[torch.Tensor]) -> None:
    """Raise UnsupportedError unless the weights are those that the state was taken with."""
    if checksum(params) != state["checksum"]:
        raise UnsupportedError(
            "the state of DASO",
            "it was taken with other weights",
            "load this rank's model and optimizer state after constructing DASO, and its state after that",
        )


def checksum(params: Iterable[torch.Tensor]) -> int:
    """Return a number that is almost certainly another one for weights of other bits."""
    total = 0
    for p in params:
        data = p.detach().contiguous().reshape(-1).view(torch.uint8)
        data = data[: data.numel() // 4 * 4].view(torch.int32) if data.numel() >= 4 else data
        total = (31 * total + int(data.sum(dtype=torch.int64))) % 2**61
    return total


class Rescue:
    """The checkpoint that a rank leaves if other ranks are lost.

    Args:
        path: File of the checkpoint.
        states: Return its content.
        detach: Called first, so that nothing more is asked of other ranks.
    """

    def __init__(self, path: Path, states: Callable[[], dict[str, Any]], detach: Callable[[], None]) -> None:
        self._path = path
        self._states = states
        self._detach = detach

    @contextmanager
    def on_lost_peer(self) -> Iterator[None]:
        """Return a context of messages: on lost contact detach, save a checkpoint, and name it in the error."""
        try:
            yield
        except LostPeerError as error:
            self._detach()
            if error.checkpoint is None:
                # An error in writing the checkpoint, such as a full disk, must not hide the reason to write one.
                with suppress(Exception):
                    self._write()
                    error.checkpoint = str(self._path)
                    error.args = (f"{error} (this rank's checkpoint: {self._path})",)
            raise

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # A launcher kills the other ranks of a node when the first one ends, maybe in the middle of this: a file under
        # the final name is always whole.
        unfinished = self._path.with_suffix(".unfinished")
        torch.save(self._states(), unfinished)
        unfinished.replace(self._path)
