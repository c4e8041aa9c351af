"""Pipelines on torch.distributed.pipelining: gradient fast-forwarding, modulo allocation, and torch's schedules."""

from gradweave.parallel.pipeline.api import Pipeline
from gradweave.parallel.pipeline.costs import measure_layers

__all__ = ["Pipeline", "measure_layers"]
