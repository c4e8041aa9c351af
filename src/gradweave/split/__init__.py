"""Linear and convolution layers whose weight gradient is a task of its own, apart from the input gradient."""

from gradweave.split.attach import Reordering, reorder

__all__ = ["Reordering", "reorder"]
