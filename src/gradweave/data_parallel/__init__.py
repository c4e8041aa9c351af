"""Data parallel without a barrier between steps, weight gradients of the first layers last."""

from gradweave.data_parallel.reducer import LostRankError
from gradweave.data_parallel.wrapper import DataParallel

__all__ = ["DataParallel", "LostRankError"]
