"""All ranks agree on one plan, or all of them raise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from gradweave.errors import ArgumentError, GradweaveError
from gradweave.parallel.pipeline.costs import measure_link
from gradweave.parallel.pipeline.partition import by_layer
from gradweave.parallel.pipeline.planner import Plan, Settings, choose
from gradweave.parallel.pipeline.process_group import Together
from gradweave.schedule.costs import Costs
from gradweave.schedule.links import Link


@dataclass(frozen=True)
class _Proposal:
    """What one rank was given."""

    settings: dict[str, Any]
    layers: tuple[Any, ...]
    costs: Costs | None
    link: Link | None
    problem: str | None


def agree(
    together: Together,
    settings: Settings,
    layers: Sequence[tuple[str, nn.Module]],
    costs: Costs | None,
    link: Link | None,
    *,
    device: torch.device,
    problem: GradweaveError | None,
) -> Plan:
    """Makes the plan from the first rank's costs; what one rank finds wrong, all of them raise.

    Args:
        together: The ranks.
        settings: As this rank was given them.
        layers: Of the whole model; none where they cannot be used.
        costs: As measured.
        link: None to measure it.
        device: For messages that are measured.
        problem: What this rank has found wrong so far.
    """
    described = _described(layers)
    problem = problem or _problem(settings)
    own = _Proposal(asdict(settings), described, costs, link, None if problem is None else str(problem))
    proposals: list[_Proposal] = together.gather(own)
    _raise_first([proposal.problem for proposal in proposals], problem)
    first = proposals[0]
    for rank, proposal in enumerate(proposals):
        for name, value in proposal.settings.items():
            if value != first.settings[name]:
                raise ArgumentError(name, value, f"is rank {rank}'s, but rank 0 has {first.settings[name]!r}")
        if proposal.layers != first.layers:
            raise ArgumentError("model", f"rank {rank}'s layers", "differ from those of rank 0; give the same model")
    if first.costs is None:
        for name, value in (("policy", settings.policy), ("byte_budget", settings.byte_budget)):
            if value == "auto" or (name == "byte_budget" and value is not None):
                raise ArgumentError(name, value, "needs costs=measure_layers(...), on the first rank at least")
    measured = first.link is None and first.costs is not None
    used = measure_link(together, device) if measured else first.link or Link()
    fine, spans = by_layer(first.costs, [name for name, _ in first.layers])
    return choose(settings, fine, together.size, used, spans=spans)


def refuse_together(together: Together, problem: GradweaveError | None) -> None:
    """Raises on all ranks what any of them has found wrong; all ranks call it."""
    _raise_first(together.gather(None if problem is None else str(problem)), problem)


def _raise_first(problems: Sequence[str | None], own: GradweaveError | None) -> None:
    if own is not None:
        raise own
    for rank, problem in enumerate(problems):
        if problem is not None:
            raise GradweaveError(f"rank {rank} of the pipeline refused: {problem}")


def _problem(settings: Settings) -> GradweaveError | None:
    try:
        settings.check()
    except GradweaveError as error:
        return error
    return None


def _described(layers: Sequence[tuple[str, nn.Module]]) -> tuple[Any, ...]:
    """Names, shapes and types of all weights, and which of them are the same."""
    numbers: dict[nn.Parameter, int] = {}
    return tuple(
        (
            name,
            tuple(
                (own, numbers.setdefault(p, len(numbers)), tuple(p.shape), p.dtype, p.requires_grad)
                for own, p in layer.named_parameters(remove_duplicate=False)
            ),
        )
        for name, layer in layers
    )
