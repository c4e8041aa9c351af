"""Ways to train: torch's own forms of an optimizer, the well-known per-parameter hook, and ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from gradweave.compare.piped import PipedStep
from gradweave.compiler import Step, compile
from gradweave.errors import ArgumentError
from gradweave.fusion import Fusion, fuse
from gradweave.optim import Eva, EvaF, EvaS
from gradweave.parallel.daso import DASO
from gradweave.parallel.data_parallel import DataParallel
from gradweave.reordering import Reordering, reorder

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": partial(torch.optim.SGD, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "adadelta": torch.optim.Adadelta,
    "nadam": torch.optim.NAdam,
}
LEARNING_RATES = {
    "sgd": 1e-2,
    "adam": 1e-3,
    "adamw": 1e-3,
    "adagrad": 1e-2,
    "rmsprop": 3e-4,
    "adadelta": 1.0,
    "nadam": 1e-3,
}
"""Unless told, or the workload has its own."""
FUSED_KERNELS = ("sgd", "adam", "adamw")
"""Those with a fused form on the CPU and on CUDA."""
STOCK = ("loop", "foreach", "fused")
FUSED = ("backward", "forward", "auto")
WOVEN = (*FUSED, "reorder", "daso", "data_parallel")
"""Those that must give the stock weights, bit for bit; the last two, since this is one process."""
WHOLE = ("compile", "pipeline")
"""Those that take steps as a whole, and must give the stock losses, to rounding."""
OTHER_RULES: dict[str, Callable[..., Optimizer]] = {"eva": Eva, "eva_f": EvaF, "eva_s": EvaS}
"""Those that are another optimizer: they train otherwise, and are judged by time and loss."""
MODES = (*STOCK, "hook", *WOVEN, *WHOLE, *OTHER_RULES)
DESCRIPTIONS = {
    "loop": "stock, one parameter after the other",
    "foreach": "stock, multi-tensor operations",
    "fused": "stock, one kernel",
    "hook": "one small optimizer per parameter, stepped in a hook",
    "backward": "gradweave: updates during backward",
    "forward": "gradweave: updates during the next forward",
    "auto": "gradweave: chosen by need and measurement",
    "reorder": "gradweave: weight gradients beside backward, where that pays",
    "daso": "gradweave: exchanges between nodes; one process has none, and must not be slower for it",
    "data_parallel": "gradweave: averages over ranks; one process has none, and must not be slower for it",
    "compile": "gradweave: forward, backward and update as one compiled graph",
    "eva": "gradweave: Eva in the place of the optimizer, with its defaults but for a learning rate that was given",
    "eva_f": "gradweave: Eva-f in the place of the optimizer, with its defaults but for a learning rate that was given",
    "eva_s": "gradweave: Eva-s in the place of the optimizer, with its defaults but for a learning rate that was given",
    "pipeline": "gradweave: two micro-batches through a pipeline; one process has all stages, and nothing to gain",
}


def baseline_of(optimizer: str) -> str:
    """The form of an optimizer that a user would pick today."""
    return "fused" if optimizer in FUSED_KERNELS else "foreach"


class Variant:
    """One way to train a model: what happens to its gradients once they are there.

    Args:
        mode: Of :data:`MODES`.
        model: What is trained.
        optimizer: Of :data:`OPTIMIZERS`.
        objective: Gives the loss of the model on a batch; for those that take whole steps.
        lr: Learning rate; None for the optimizer's usual one.
        max_norm: What gradients are clipped to; for those that take whole steps.

    Attributes:
        trained: What is called: the model, or what it is wrapped in.
    """

    def __init__(
        self,
        mode: str,
        model: nn.Module,
        optimizer: str,
        objective: Callable[..., torch.Tensor],
        lr: float | None = None,
        max_norm: float | None = None,
    ) -> None:
        if optimizer not in OPTIMIZERS:
            raise ArgumentError("--optimizer", optimizer, f"use one of {', '.join(OPTIMIZERS)}")
        if mode == "fused" and optimizer not in FUSED_KERNELS:
            raise ArgumentError("--modes", mode, f"torch has no fused {optimizer}; use foreach")
        self.mode = mode
        self.fusion: Fusion | None = None
        self.reordering: Reordering | None = None
        self.daso: DASO | None = None
        self.whole_step: Step | PipedStep | None = None
        self.trained: nn.Module = model
        make = partial(OPTIMIZERS[optimizer], lr=LEARNING_RATES[optimizer] if lr is None else lr)
        self._hooked: list[Optimizer] = []
        if mode in OTHER_RULES:
            self.optimizer = OTHER_RULES[mode](model, lr=lr)
        elif mode == "hook":
            self._attach_hooks(model, lambda params: make(params, **_form(baseline_of(optimizer))))
        else:
            form = mode if mode in STOCK else baseline_of(optimizer)
            self.optimizer = make(model.parameters(), **_form(form))
            if mode in FUSED:
                self.fusion = fuse(model, self.optimizer, cast(Any, mode))
            elif mode == "reorder":
                self.reordering = reorder(model)
            elif mode == "daso":
                self.daso = DASO(model, self.optimizer)
            elif mode == "data_parallel":
                self.trained = DataParallel(model, self.optimizer)
            elif mode == "compile":
                self.whole_step = compile(model, objective, self.optimizer, max_grad_norm=max_norm)
            elif mode == "pipeline":
                self.whole_step = PipedStep(model, self.optimizer, objective, max_norm)

    def _attach_hooks(self, model: nn.Module, make: Callable[[Iterable[nn.Parameter]], Optimizer]) -> None:
        own = {p: make([p]) for p in model.parameters() if p.requires_grad}
        self._hooked = list(own.values())

        def step(p: torch.Tensor) -> None:
            optimizer = own[p]  # type: ignore[index]
            optimizer.step()
            optimizer.zero_grad()

        for p in own:
            p.register_post_accumulate_grad_hook(step)

    @property
    def optimizers(self) -> list[Optimizer]:
        """Every optimizer involved."""
        return self._hooked or [self.optimizer]

    @property
    def learning_rate(self) -> float:
        """What it trains with, at first."""
        return float(self.optimizers[0].param_groups[0]["lr"])

    @property
    def clips(self) -> bool:
        """Whether all gradients can be clipped by their common norm before the update."""
        return self.mode not in ("hook", "backward")

    def step(self) -> None:
        """Ends a training step."""
        if not self._hooked:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def finish(self) -> None:
        """Applies what is pending and lets go of the model."""
        if self.fusion is not None:
            self.fusion.detach()
        if self.reordering is not None:
            self.reordering.detach()
        if self.daso is not None:
            self.daso.finish()
        if isinstance(self.trained, DataParallel):
            self.trained.detach()
        if isinstance(self.whole_step, PipedStep):
            self.whole_step.close()

    def explain(self) -> str:
        """What is done, in a line."""
        attached = self.fusion or self.reordering
        return attached.explain() if attached is not None else DESCRIPTIONS[self.mode]


def _form(name: str) -> dict[str, Any]:
    if name == "fused":
        return {"fused": True}
    return {"foreach": name == "foreach"}
