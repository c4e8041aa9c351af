"""Second-order optimizers at first-order cost."""

from __future__ import annotations

from gradweave.optim.eva import Eva, EvaF
from gradweave.optim.eva_s import EvaS

__all__ = ["Eva", "EvaF", "EvaS"]
