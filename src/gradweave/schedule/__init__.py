"""Schedules as data: task graphs, policies, simulation, pictures. Needs no torch.

graph = pipeline(Costs.uniform(24), stages=4, microbatches=4)
timeline = plan(graph, policy="modulo").simulate()
timeline.save("modulo.png")
"""

from __future__ import annotations

from gradweave.schedule.builders import data_parallel, hierarchical, pipeline, single
from gradweave.schedule.costs import Costs, LayerCost
from gradweave.schedule.graph import Family, TaskGraph
from gradweave.schedule.links import Cluster, Link
from gradweave.schedule.networks import NETWORKS, Hardware, network
from gradweave.schedule.planning import plan
from gradweave.schedule.policies import POLICIES, Policy
from gradweave.schedule.schedule import Discipline, Lane, Schedule
from gradweave.schedule.tasks import Buffer, Demand, Kind, Task
from gradweave.schedule.timeline import Span, Timeline, save_timelines

__all__ = [
    "NETWORKS",
    "POLICIES",
    "Buffer",
    "Cluster",
    "Costs",
    "Demand",
    "Discipline",
    "Family",
    "Hardware",
    "Kind",
    "Lane",
    "LayerCost",
    "Link",
    "Policy",
    "Schedule",
    "Span",
    "Task",
    "TaskGraph",
    "Timeline",
    "data_parallel",
    "hierarchical",
    "network",
    "pipeline",
    "plan",
    "save_timelines",
    "single",
]
