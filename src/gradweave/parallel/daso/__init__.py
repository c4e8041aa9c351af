"""DASO (Coquelin et al. 2021): data parallel over nodes that exchange weights now and then, in the background."""

from __future__ import annotations

from gradweave.parallel.daso.api import DASO

__all__ = ["DASO"]
