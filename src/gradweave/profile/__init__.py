"""Measuring what the tasks of a real training step cost."""

from gradweave.profile.measure import measure_costs

__all__ = ["measure_costs"]
