"""Linear and convolution layers whose weight gradient is a task of its own, apart from the input gradient."""

from gradweave.reordering.api import Reordering, reorder

__all__ = ["Reordering", "reorder"]
