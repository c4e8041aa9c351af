"""All ranks agree on one plan, or all of them raise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import torch
from torch import nn

from gradweave._runtime.peers.link import measure_round_trip
from gradweave._runtime.peers.same_on_ranks import describe_parameters, same_on_ranks
from gradweave.errors import ArgumentError, GradweaveError
from gradweave.parallel.pipeline.partition import by_layer
from gradweave.parallel.pipeline.planner import Plan, Settings, choose
from gradweave.parallel.pipeline.process_group import PipelinePeers
from gradweave.schedule.costs import Costs
from gradweave.schedule.links import Link


def agree(
    peers: PipelinePeers,
    settings: Settings,
    layers: Sequence[tuple[str, nn.Module]],
    costs: Costs | None,
    link: Link | None,
    *,
    device: torch.device,
    problem: GradweaveError | None,
) -> Plan:
    """Make the plan from the first rank's costs; what one rank finds wrong, all of them raise.

    Args:
        peers: The ranks.
        settings: As this rank was given them.
        layers: Of the whole model; none where they cannot be used.
        costs: As measured.
        link: None to measure it.
        device: For messages that are measured.
        problem: What this rank has found wrong so far.
    """
    with same_on_ranks(peers.group, technique="the pipeline") as facts:
        if problem is not None:
            raise problem
        settings.check()
        facts |= {name: repr(value) for name, value in asdict(settings).items()}
        facts["the names of layers"] = ", ".join(name for name, _ in layers)
        facts |= describe_parameters(
            (f"{name}.{own}", p) for name, layer in layers for own, p in layer.named_parameters(remove_duplicate=False)
        )
    costs, link = peers.from_first((costs, link))
    if costs is None:
        for name, value in (("policy", settings.policy), ("byte_budget", settings.byte_budget)):
            if value == "auto" or (name == "byte_budget" and value is not None):
                raise ArgumentError(name, value, "needs costs=measure_layers(...), on the first rank at least")
    if link is None:
        link = Link() if costs is None else measure_round_trip(peers.group, device)
    fine, spans = by_layer(costs, [name for name, _ in layers])
    return choose(settings, fine, peers.size, link, spans=spans)
