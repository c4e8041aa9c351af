"""Second-order optimizers at first-order cost, and the dense ones they are measured against."""

from __future__ import annotations

from gradweave.optim.eva import Eva, EvaF
from gradweave.optim.eva_s import EvaS
from gradweave.optim.kfac import FOOF, KFAC
from gradweave.optim.shampoo import Shampoo

__all__ = ["FOOF", "KFAC", "Eva", "EvaF", "EvaS", "Shampoo"]
