"""The policies by name. To add one: a file here, a line in the table below, a row in its test.

A policy is a function from a task graph (and keyword options) to a schedule.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

from gradweave.schedule.graph import Family
from gradweave.schedule.policies.backward_fusion import backward_fusion
from gradweave.schedule.policies.cross_step import cross_step
from gradweave.schedule.policies.daso import daso
from gradweave.schedule.policies.ddp import ddp
from gradweave.schedule.policies.fast_forward import fast_forward
from gradweave.schedule.policies.forward_fusion import forward_fusion
from gradweave.schedule.policies.gpipe import gpipe
from gradweave.schedule.policies.in_order import in_order
from gradweave.schedule.policies.interleaved import interleaved
from gradweave.schedule.policies.joint import joint
from gradweave.schedule.policies.modulo import modulo
from gradweave.schedule.policies.no_barrier import no_barrier
from gradweave.schedule.policies.one_f_one_b import one_f_one_b
from gradweave.schedule.policies.priority import priority
from gradweave.schedule.policies.reverse_first_k import reverse_first_k
from gradweave.schedule.policies.side_region import side_region
from gradweave.schedule.policies.side_stream import side_stream
from gradweave.schedule.policies.zb_h1 import zb_h1
from gradweave.schedule.schedule import Schedule

_SINGLE = (Family.SINGLE,)
_REPLICAS = (Family.DATA_PARALLEL, Family.HIERARCHICAL)
_PIPELINE = (Family.PIPELINE,)


@dataclass(frozen=True)
class Policy:
    """A policy and the scenarios it fits."""

    function: Callable[..., Schedule]
    families: tuple[Family, ...]

    @property
    def name(self) -> str:
        """The name it is asked for by."""
        return self.function.__name__

    @property
    def summary(self) -> str:
        """What it does, in a line."""
        return (inspect.getdoc(self.function) or "").partition("\n")[0]

    @property
    def options(self) -> tuple[str, ...]:
        """Names of the options it takes."""
        return tuple(inspect.signature(self.function).parameters)[1:]


POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        Policy(in_order, _SINGLE),
        Policy(backward_fusion, _SINGLE),
        Policy(forward_fusion, _SINGLE),
        Policy(side_stream, _SINGLE),
        Policy(joint, _SINGLE),
        Policy(cross_step, _SINGLE),
        Policy(side_region, _SINGLE),
        Policy(ddp, _REPLICAS),
        Policy(no_barrier, _REPLICAS),
        Policy(reverse_first_k, _REPLICAS),
        Policy(priority, _REPLICAS),
        Policy(daso, (Family.HIERARCHICAL,)),
        Policy(gpipe, _PIPELINE),
        Policy(one_f_one_b, _PIPELINE),
        Policy(interleaved, _PIPELINE),
        Policy(zb_h1, _PIPELINE),
        Policy(fast_forward, _PIPELINE),
        Policy(modulo, _PIPELINE),
    )
}
