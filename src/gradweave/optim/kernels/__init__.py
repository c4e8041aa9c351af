"""Triton kernels of Eva and Eva-f on GPUs: many tensors in few launches.

Modules whose names end in ``_triton`` hold kernels and import Triton, which is optional; no other module imports them
before it is known that kernels run. ``step`` launches the optimizers' step, and ``gpu_statistics`` what sums layers'
inputs for it while a model trains.
"""
