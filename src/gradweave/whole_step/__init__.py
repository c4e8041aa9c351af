"""The whole training step as one graph: traced, rewritten, compiled, captured."""

from __future__ import annotations

from gradweave.whole_step.step import Step, compile

__all__ = ["Step", "compile"]
