"""Optimizer fusion under a loop you keep: updates moved into backward or into the next forward."""

from __future__ import annotations

from gradweave.fusion.api import Fusion, fuse, fusions_of

__all__ = ["Fusion", "fuse", "fusions_of"]
