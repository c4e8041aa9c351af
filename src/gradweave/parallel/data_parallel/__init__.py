"""Data parallel without a barrier between steps, weight gradients of the first layers last."""

from gradweave.parallel.data_parallel.api import DataParallel

__all__ = ["DataParallel"]
