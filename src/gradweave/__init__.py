"""gradweave: PyTorch training made faster by weaving the work of a training step together.

Names are imported when first used, so that ``import gradweave.schedule`` needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradweave.errors import GradweaveError
    from gradweave.fusion import Fusion, fuse
    from gradweave.schedule import Schedule, TaskGraph, Timeline, plan

__version__ = "0.1.0"

__all__ = ["Fusion", "GradweaveError", "Schedule", "TaskGraph", "Timeline", "fuse", "plan"]

_HOMES = {
    "Fusion": "gradweave.fusion",
    "GradweaveError": "gradweave.errors",
    "Schedule": "gradweave.schedule",
    "TaskGraph": "gradweave.schedule",
    "Timeline": "gradweave.schedule",
    "fuse": "gradweave.fusion",
    "plan": "gradweave.schedule",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'gradweave' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
