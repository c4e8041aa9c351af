"""Triton kernels: many tensors in few launches."""
