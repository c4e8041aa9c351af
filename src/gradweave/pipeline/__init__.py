"""Pipelines on torch.distributed.pipelining: gradient fast-forwarding, modulo allocation, and torch's schedules."""

from gradweave.pipeline.costs import measure_layers
from gradweave.pipeline.front import Pipeline

__all__ = ["Pipeline", "measure_layers"]
