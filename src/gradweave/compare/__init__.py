"""The same training, stock and woven, side by side: time, memory, and whether the result is the same."""

from __future__ import annotations

from gradweave.compare.results import Comparison
from gradweave.compare.run import compare
from gradweave.compare.variants import MODES
from gradweave.compare.workloads import WORKLOADS, Workload, find_workload

__all__ = ["MODES", "WORKLOADS", "Comparison", "Workload", "compare", "find_workload"]
