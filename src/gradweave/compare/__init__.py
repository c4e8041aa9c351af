"""The same training, stock and woven, side by side: time, memory and sameness of the result."""

from __future__ import annotations

from gradweave.compare.comparison import Comparison
from gradweave.compare.run import compare
from gradweave.compare.variants import MODES, Mode, OptimizerName
from gradweave.compare.workloads import WORKLOADS, Workload, find_workload

__all__ = ["MODES", "WORKLOADS", "Comparison", "Mode", "OptimizerName", "Workload", "compare", "find_workload"]
