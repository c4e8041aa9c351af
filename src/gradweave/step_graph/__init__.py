"""The graph of a training step: what its nodes are, which task each belongs to, and how to run it task by task."""
