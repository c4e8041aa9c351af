"""Reordered backward: weight gradients of linear and convolution layers apart from the chain of input gradients."""

from gradweave.reordering.api import Reordering, layer_names, reorder, split_in_order

__all__ = ["Reordering", "layer_names", "reorder", "split_in_order"]
