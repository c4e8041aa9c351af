"""Calls of layers whose backward is split: the input gradient at once, the weight gradient as a task for later."""
