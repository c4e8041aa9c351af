"""``gradweave simulate``: schedules on devices that need not exist, in numbers and pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from gradweave.cli.progress import progress
from gradweave.cli.tables import counted, print_results
from gradweave.errors import ArgumentError, GradweaveError
from gradweave.schedule import (
    Costs,
    Link,
    Policy,
    Schedule,
    TaskGraph,
    Timeline,
    data_parallel,
    hierarchical,
    network,
    pipeline,
    plan,
    save_timelines,
    single,
)
from gradweave.schedule.graph import Family
from gradweave.schedule.networks import NETWORKS
from gradweave.schedule.output import check_ending
from gradweave.schedule.policies import policies_for

simulate_app = typer.Typer(help="Simulate schedules, on any number of devices, and compare them.", no_args_is_help=True)

_MOST_STEPS = 256
_MOST_TASKS = 200_000
"""About ten thousand tasks are scheduled per second, fewer by policies that search."""


def _policy_option(family: Family) -> Any:
    names = ", ".join(policy.name for policy in policies_for(family))
    return typer.Option("--policy", help=f'Comma-separated, or "all": {names}.')


NetworkOption = Annotated[
    str, typer.Option(help=f'"uniform" (equal layers), a cost file (.json), or one of {", ".join(NETWORKS)}.')
]
LayersOption = Annotated[int | None, typer.Option(help='Number of layers; only with "--network uniform".')]
BatchOption = Annotated[int | None, typer.Option(help="Samples per micro-batch; only with a known network.")]
StepsOption = Annotated[int, typer.Option(help="Complete training steps.")]
NextForwardOption = Annotated[bool, typer.Option(help="Add the forward of one more step.")]
LinkOption = Annotated[str, typer.Option(help='Rate and latency, as in "25Gbit/s,10us"; or "free".')]
BudgetOption = Annotated[int | None, typer.Option(help="Most bytes of activations and gradients per device.")]
BucketOption = Annotated[int | None, typer.Option(help="Bytes per message; 0 sends one per layer.")]
OutOption = Annotated[Path | None, typer.Option(help="Picture (.png, .svg, .pdf) or Perfetto trace (.json).")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


@simulate_app.command("single")
def simulate_single(
    policy: Annotated[str, _policy_option(Family.SINGLE)] = "all",
    network: NetworkOption = "densenet121",
    layers: LayersOption = None,
    batch: BatchOption = None,
    steps: StepsOption = 2,
    next_forward: NextForwardOption = True,
    byte_budget: BudgetOption = None,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """One device: order of weight gradients and updates."""
    costs = _costs(network, layers, batch, default_batch=32)
    _check_size(costs, steps=steps)
    graph = single(costs, steps=steps, next_forward=next_forward)
    _simulate(graph, policy, {}, byte_budget, out, as_json)


@simulate_app.command("data-parallel")
def simulate_data_parallel(
    policy: Annotated[str, _policy_option(Family.DATA_PARALLEL)] = "all",
    network: NetworkOption = "resnet50",
    layers: LayersOption = None,
    batch: BatchOption = None,
    devices: Annotated[int, typer.Option(help="Number of replicas.")] = 8,
    link: LinkOption = "400Gbit/s,5us",
    steps: StepsOption = 6,
    next_forward: NextForwardOption = True,
    bucket_bytes: BucketOption = None,
    k: Annotated[int | None, typer.Option(help="Layers that reverse_first_k reverses (default: searched).")] = None,
    byte_budget: BudgetOption = None,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Replicas that average gradients over a link."""
    costs = _costs(network, layers, batch, default_batch=64)
    _check_size(costs, steps=steps)
    graph = data_parallel(
        costs,
        replicas=devices,
        link=Link.parse(link),
        steps=steps,
        next_forward=next_forward,
    )
    _simulate(graph, policy, {"bucket_bytes": bucket_bytes, "k": k}, byte_budget, out, as_json)


@simulate_app.command("pipeline")
def simulate_pipeline(
    policy: Annotated[str, _policy_option(Family.PIPELINE)] = "all",
    network: NetworkOption = "uniform",
    layers: LayersOption = None,
    batch: BatchOption = None,
    stages: Annotated[int, typer.Option("--stages", "--devices", help="Number of devices.")] = 4,
    microbatches: Annotated[int, typer.Option(help="Micro-batches per step.")] = 8,
    link: LinkOption = "free",
    steps: StepsOption = 1,
    next_forward: NextForwardOption = False,
    chunks: Annotated[int | None, typer.Option(help="Runs of layers per device, for interleaved.")] = None,
    group: Annotated[int | None, typer.Option(help="Neighbouring layers that stay together, for modulo.")] = None,
    max_in_flight: Annotated[int | None, typer.Option(help="Most micro-batches in flight at once.")] = None,
    byte_budget: BudgetOption = None,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Devices that hold different layers."""
    costs = _costs(network, layers, batch, default_batch=1)
    _check_size(costs, steps=steps, microbatches=microbatches)
    graph = pipeline(
        costs,
        stages=stages,
        microbatches=microbatches,
        link=Link.parse(link),
        steps=steps,
        next_forward=next_forward,
    )
    options = {"chunks": chunks, "group": group, "max_in_flight": max_in_flight}
    _simulate(graph, policy, options, byte_budget, out, as_json)


@simulate_app.command("daso")
def simulate_daso(
    policy: Annotated[str, _policy_option(Family.HIERARCHICAL)] = "ddp,daso",
    network: NetworkOption = "resnet50",
    layers: LayersOption = None,
    batch: BatchOption = None,
    nodes: Annotated[int, typer.Option(help="Number of nodes.")] = 4,
    local_ranks: Annotated[int, typer.Option("--local-ranks", "--devices", help="Devices per node.")] = 4,
    link: LinkOption = "200Gbit/s,10us",
    local_link: Annotated[str, typer.Option(help="Link inside a node, in the form of --link.")] = "300GB/s,2us",
    steps: Annotated[int | None, typer.Option(help="Complete training steps (default: as many as needed).")] = None,
    next_forward: NextForwardOption = True,
    every: Annotated[int | None, typer.Option(help="Steps between exchanges of daso.")] = None,
    wait: Annotated[int | None, typer.Option(help="Steps from an exchange of daso to its merge.")] = None,
    payload: Annotated[str | None, typer.Option(help="Type of exchanged weights: float32 or bfloat16.")] = None,
    bucket_bytes: BucketOption = None,
    k: Annotated[int | None, typer.Option(help="Layers that reverse_first_k reverses (default: searched).")] = None,
    byte_budget: BudgetOption = None,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Nodes of devices that exchange weights every few steps."""
    costs, between = _costs(network, layers, batch, default_batch=64), Link.parse(link)
    if steps is None:
        steps = _steps_to_steady_state(costs, between, nodes, every, wait)
    _check_size(costs, steps=steps)
    graph = hierarchical(
        costs,
        nodes=nodes,
        local_ranks=local_ranks,
        link=between,
        local_link=Link.parse(local_link),
        steps=steps,
        next_forward=next_forward,
    )
    options = {"every": every, "wait": wait, "payload": payload, "bucket_bytes": bucket_bytes, "k": k}
    _simulate(graph, policy, options, byte_budget, out, as_json)


def _costs(name: str, layers: int | None, batch: int | None, default_batch: int) -> Costs:
    is_file = name.endswith(".json")
    if batch is not None and (name == "uniform" or is_file):
        raise ArgumentError("--batch", batch, f"is for known networks; {name} has costs of its own")
    if layers is not None and layers > _MOST_TASKS:
        raise ArgumentError("--layers", layers, f"give at most {_MOST_TASKS:,}")
    if name == "uniform":
        return Costs.uniform(24 if layers is None else layers)
    if layers is not None:
        raise ArgumentError("--layers", layers, f'is for "--network uniform"; {name} has its own')
    return Costs.load(name) if is_file else network(name, batch=default_batch if batch is None else batch)


def _tasks(costs: Costs, steps: int, microbatches: int) -> int:
    """Return about how many tasks a graph has: three per layer and micro-batch, an update and a message per layer."""
    return len(costs.layers) * steps * (3 * microbatches + 2)


def _check_size(costs: Costs, *, steps: int, microbatches: int = 1) -> None:
    """Raise ArgumentError for graphs that would take hours to simulate, before they are built."""
    if _tasks(costs, steps, microbatches) <= _MOST_TASKS:
        return
    layers = len(costs.layers)
    if microbatches > steps:
        most = (_MOST_TASKS // (layers * max(1, steps)) - 2) // 3
        argument, value, others = "--microbatches", microbatches, counted(steps, "step")
    else:
        most = _MOST_TASKS // (layers * (3 * max(1, microbatches) + 2))
        argument, value, others = "--steps", steps, counted(microbatches, "micro-batch")
    reason = f"gives too many tasks to simulate with {counted(layers, 'layer')} and {others}"
    limit = f"give at most {most:,}" if most > 0 else "use a network of fewer layers"
    raise ArgumentError(argument, value, f"{reason}; {limit}")


def _steps_to_steady_state(costs: Costs, link: Link, nodes: int, every: int | None, wait: int | None) -> int:
    """Return the steps after which exchanges that outrun the link have caught up with their merges."""
    every, wait = 4 if every is None else max(1, every), 1 if wait is None else max(0, wait)
    backlog = link.all_reduce_seconds(costs.parameter_bytes, nodes) / every - costs.compute_seconds
    catching_up = wait * costs.compute_seconds / backlog if backlog > 0 else 0.0
    affordable = max(1, _MOST_TASKS // _tasks(costs, 1, 1))
    return min(_MOST_STEPS, affordable, max(12, wait + 3 * every + int(min(catching_up, _MOST_STEPS))))


def _simulate(
    graph: TaskGraph,
    policies: str,
    options: dict[str, Any],
    byte_budget: int | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Apply each policy with the options it takes, and show the results side by side."""
    if out is not None:
        check_ending(out)
    if byte_budget is not None and byte_budget <= 0:
        raise ArgumentError("--byte-budget", byte_budget, "give a positive number of bytes")
    fitting: dict[str, Policy] = {policy.name: policy for policy in policies_for(graph.family)}
    names = list(fitting) if policies == "all" else [name.strip() for name in policies.split(",")]
    unknown = [name for name in names if name not in fitting]
    if unknown:
        raise ArgumentError("--policy", unknown[0], f"use one or more of {', '.join(fitting)}")
    given = {option: value for option, value in options.items() if value is not None}
    for option, value in given.items():
        if not any(option in fitting[name].options for name in names):
            takers = ", ".join(name for name, policy in fitting.items() if option in policy.options)
            raise ArgumentError(f"--{option.replace('_', '-')}", value, f"is for {takers}; add one to --policy")
    if byte_budget is not None:
        given["byte_budget"] = byte_budget
    results: list[tuple[Schedule, Timeline]] = []
    refused: dict[str, GradweaveError] = {}
    with progress(names, "simulating", quiet=as_json) as each:
        for name in each:
            # An option is for the policies that take it: "all" may be given with options of some.
            accepted = {option: value for option, value in given.items() if option in fitting[name].options}
            try:
                schedule = plan(graph, policy=fitting[name].name, **accepted)
                results.append((schedule, schedule.simulate(byte_budget=byte_budget)))
            except GradweaveError as error:
                if policies != "all":
                    raise
                refused[name] = error
    if not results:
        raise next(iter(refused.values()))
    for name, reason in refused.items():
        typer.echo(f"left out {name}: {reason}", err=True)
    if out is not None:
        save_timelines([timeline for _, timeline in results], out)
    if as_json:
        print(json.dumps({"results": [_figures(*result) for result in results]}, allow_nan=False))
    else:
        print_results(graph, results, out)


def _figures(schedule: Schedule, timeline: Timeline) -> dict[str, Any]:
    return {
        "policy": schedule.policy,
        "makespan": timeline.makespan,
        "step_time": timeline.step_time,
        "peak_bytes": timeline.peak_bytes,
        "exposed_communication": timeline.exposed_communication,
        "busy": timeline.busy,
        "idle": timeline.idle,
        "tasks": len(schedule.graph.tasks),
        "steps": schedule.graph.steps,
        "options": schedule.options,
    }
