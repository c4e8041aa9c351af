"""The graph of a training step: what it differentiates, which task each node belongs to, how to run it by task."""
