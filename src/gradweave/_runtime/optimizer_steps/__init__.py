"""Optimizers' own steps: hooks around them, steps in parts, and checks that parts give the same result."""
