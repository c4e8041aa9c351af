"""The ``gradweave`` command."""

from __future__ import annotations

from gradweave.cli.app import main

__all__ = ["main"]
