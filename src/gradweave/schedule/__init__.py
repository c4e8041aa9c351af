"""Schedules as data: task graphs, policies, simulation, pictures. Needs no torch.

graph = pipeline(Costs.uniform(24), stages=4, microbatches=4)
timeline = plan(graph, policy="modulo").simulate()
timeline.save("modulo.png")
"""

from __future__ import annotations

from gradweave.schedule.builders import data_parallel, hierarchical, pipeline, single
from gradweave.schedule.costs import Costs, LayerCost
from gradweave.schedule.graph import Family, TaskGraph
from gradweave.schedule.lanes import Discipline, Lane
from gradweave.schedule.links import Cluster, Link
from gradweave.schedule.networks import NETWORKS, Hardware, network
from gradweave.schedule.output import save_timelines
from gradweave.schedule.policies import POLICIES, Policy, PolicyName, plan
from gradweave.schedule.schedule import Schedule
from gradweave.schedule.tasks import Buffer, Demand, Kind, Task
from gradweave.schedule.timeline import Span, Timeline

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
    "PolicyName",
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
