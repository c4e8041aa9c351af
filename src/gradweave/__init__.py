"""gradweave: PyTorch training made faster by weaving the work of a training step together.

Names are imported when first used, so that ``import gradweave.schedule`` needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradweave.compiler import compile
    from gradweave.errors import GradweaveError
    from gradweave.fusion import fuse
    from gradweave.optim import Eva, EvaF, EvaS
    from gradweave.parallel.daso import DASO
    from gradweave.parallel.data_parallel import DataParallel
    from gradweave.parallel.pipeline import Pipeline
    from gradweave.reordering import reorder
    from gradweave.schedule import Schedule, TaskGraph, Timeline, plan

__version__ = "0.1.0"

__all__ = [
    "DASO", "DataParallel", "Eva", "EvaF", "EvaS", "GradweaveError", "Pipeline", "Schedule", "TaskGraph", "Timeline",
    "compile", "fuse", "plan", "reorder",
]  # fmt: skip

_HOMES = {
    "DASO": "gradweave.parallel.daso",
    "DataParallel": "gradweave.parallel.data_parallel",
    "Eva": "gradweave.optim",
    "EvaF": "gradweave.optim",
    "EvaS": "gradweave.optim",
    "GradweaveError": "gradweave.errors",
    "Pipeline": "gradweave.parallel.pipeline",
    "Schedule": "gradweave.schedule",
    "TaskGraph": "gradweave.schedule",
    "Timeline": "gradweave.schedule",
    "compile": "gradweave.compiler",
    "fuse": "gradweave.fusion",
    "plan": "gradweave.schedule",
    "reorder": "gradweave.reordering",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'gradweave' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
