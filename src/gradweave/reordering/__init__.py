"""Linear and convolution layers whose weight gradient is a task of its own, apart from the input gradient."""

from gradweave.reordering.api import Reordering, layer_names, reorder, split_in_order

__all__ = ["Reordering", "layer_names", "reorder", "split_in_order"]
