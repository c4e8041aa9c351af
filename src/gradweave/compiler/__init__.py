"""The whole training step as one graph: traced, rewritten, compiled, captured."""

from __future__ import annotations

from gradweave.compiler.api import Step, compile

__all__ = ["Step", "compile"]
