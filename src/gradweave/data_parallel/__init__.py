"""Data parallel without a barrier between steps, weight gradients of the first layers last."""

from gradweave.data_parallel.failures import LostRankError
from gradweave.data_parallel.wrapper import DataParallel

__all__ = ["DataParallel", "LostRankError"]
