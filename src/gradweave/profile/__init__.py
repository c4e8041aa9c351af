"""Measured costs of the tasks of a real training step."""

from gradweave.profile.cache import cached_costs
from gradweave.profile.measure import measure_costs

__all__ = ["cached_costs", "measure_costs"]
