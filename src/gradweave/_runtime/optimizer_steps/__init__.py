"""Optimizers' own steps: run in parts, run later, and preceded or followed by something else."""
