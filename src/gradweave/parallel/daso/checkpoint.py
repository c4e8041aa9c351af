"""DASO's part of a checkpoint: counters, what nodes have in common, and an exchange under way."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from gradweave.errors import ArgumentError
from gradweave.parallel.daso.cadence import Figures
from gradweave.parallel.daso.consensus import Verdict
from gradweave.parallel.daso.exchange import COUNTERS, Exchange, Flight
from gradweave.parallel.daso.flat_buffers import Layout
from gradweave.parallel.daso.topology import Groups, Topology

_VERSION = 1


def save(exchange: Exchange, topology: Topology, params: list[torch.Tensor], weights: Layout) -> dict[str, Any]:
    """Waits for a transfer that this rank carries, but merges nothing."""
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


def fits(state: dict[str, Any], topology: Topology, groups: Groups) -> bool:
    """Whether every rank has loaded what it saved itself, on the same nodes and at the same step."""
    if state.get("version") != _VERSION:
        raise ArgumentError(
            "state", state.get("version"), f"is not a state of DASO, or of another version than {_VERSION}"
        )
    own = state["ranks"] == [list(members) for members in topology.ranks] and state["rank"] == topology.rank
    if groups.everyone is None:
        return bool(own)
    answers: list[Any] = [None] * dist.get_world_size(groups.everyone)
    counters = [state["steps"], state["pending"], *(state["exchange"][name] for name in COUNTERS)]
    dist.all_gather_object(answers, (own, counters), group=groups.everyone)
    return all(answer == (True, answers[0][1]) for answer in answers)


def load(exchange: Exchange, state: dict[str, Any], params: list[torch.Tensor], weights: Layout) -> None:
    """Takes what :func:`save` gave."""
    weights.become(params[place] for place in state["weights"])
    exchange.take(state["exchange"])
    saved, exchange.flight = state["flight"], None
    if saved is not None:
        device = params[0].device
        vectors = {
            name: None if saved[name] is None else [v.to(device, copy=True) for v in saved[name]]
            for name in ("sent", "total")
        }
        saved = {**saved, **vectors}
        verdict = saved["verdict"]
        if verdict is not None:
            fields = {"figures": Figures(**verdict["figures"]), "alive": tuple(verdict["alive"])}
            saved["verdict"] = Verdict(**{**verdict, **fields})
        exchange.flight = Flight(**saved)


def merge_alone(exchange: Exchange, state: dict[str, Any], params: list[torch.Tensor], weights: Layout) -> None:
    """On other nodes than it was saved on: merges what had arrived, and forgets what had not."""
    load(exchange, state, params, weights)
    flight, exchange.flight = exchange.flight, None
    if flight is not None and flight.total is not None and flight.verdict is not None and flight.verdict.sound:
        exchange.apply(flight, flight.verdict, flight.total)


def check_weights(state: dict[str, Any], params: Iterable[torch.Tensor]) -> None:
    """The state goes with weights that must be loaded before it."""
    if checksum(params) != state["checksum"]:
        remedy = "load this rank's model and optimizer state behind constructing DASO, and its state behind that"
        raise ArgumentError("state", "taken with other weights", remedy)


def checksum(params: Iterable[torch.Tensor]) -> int:
    """A number that weights with other bits have hardly ever."""
    total = 0
    for p in params:
        data = p.detach().contiguous().reshape(-1).view(torch.uint8)
        data = data[: data.numel() // 4 * 4].view(torch.int32) if data.numel() >= 4 else data
        total = (31 * total + int(data.sum(dtype=torch.int64))) % 2**61
    return total
