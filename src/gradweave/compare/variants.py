"""Ways to train: torch's own forms of an optimizer, the well-known per-parameter hook, and gradweave's techniques."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from gradweave.compiler import Step, compile
from gradweave.errors import ArgumentError
from gradweave.fusion import Fusion, fuse
from gradweave.optim import Eva, EvaF, EvaS
from gradweave.parallel.daso import DASO
from gradweave.parallel.data_parallel import DataParallel
from gradweave.parallel.pipeline import Pipeline
from gradweave.reordering import Reordering, reorder
from gradweave.schedule.tasks import Kind

OptimizerName = Literal["sgd", "adam", "adamw", "adagrad", "rmsprop", "adadelta", "nadam"]
StockForm = Literal["loop", "foreach", "fused"]
FusionMode = Literal["backward", "forward", "auto"]
OtherRule = Literal["eva", "eva_f", "eva_s"]
Mode = Literal[StockForm, "hook", FusionMode, "reorder", "daso", "data_parallel", "compile", "pipeline", OtherRule]

OPTIMIZERS: dict[OptimizerName, Callable[..., Optimizer]] = {
    "sgd": partial(torch.optim.SGD, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "adadelta": torch.optim.Adadelta,
    "nadam": torch.optim.NAdam,
}
LEARNING_RATES: dict[OptimizerName, float] = {
    "sgd": 1e-2,
    "adam": 1e-3,
    "adamw": 1e-3,
    "adagrad": 1e-2,
    "rmsprop": 3e-4,
    "adadelta": 1.0,
    "nadam": 1e-3,
}
"""Learning rates of workloads that have none of their own."""
FUSED_KERNELS: tuple[OptimizerName, ...] = ("sgd", "adam", "adamw")
"""Optimizers with a fused form on the CPU and on CUDA."""
MODES: tuple[Mode, ...] = get_args(Mode)
STOCK: tuple[Mode, ...] = get_args(StockForm)
WOVEN: tuple[Mode, ...] = (*get_args(FusionMode), "reorder", "daso", "data_parallel")
"""Modes that must give the stock weights, bit for bit; the last two do so in one process."""
WHOLE: tuple[Mode, ...] = ("compile", "pipeline")
"""Modes that take steps as a whole, and must give the stock losses up to rounding."""
OTHER_RULES: dict[Mode, Callable[..., Optimizer]] = {"eva": Eva, "eva_f": EvaF, "eva_s": EvaS}
"""Modes that are other optimizers: they train differently, and are judged by time and loss."""
DESCRIPTIONS: dict[Mode, str] = {
    "loop": "stock, one parameter after the other",
    "foreach": "stock, multi-tensor operations",
    "fused": "stock, one kernel",
    "hook": "one small optimizer per parameter, stepped in a hook",
    "backward": "gradweave: updates during backward",
    "forward": "gradweave: updates during the next forward",
    "auto": "gradweave: chosen by need and measurement",
    "reorder": "gradweave: weight gradients beside backward, where that pays",
    "daso": "gradweave: exchanges between nodes; a single process has none, and must not be slower for it",
    "data_parallel": "gradweave: averages over ranks; a single process has none, and must not be slower for it",
    "compile": "gradweave: forward, backward and update as one compiled graph",
    "eva": "gradweave: Eva instead of the optimizer, with its defaults except for a given learning rate",
    "eva_f": "gradweave: Eva-f instead of the optimizer, with its defaults except for a given learning rate",
    "eva_s": "gradweave: Eva-s instead of the optimizer, with its defaults except for a given learning rate",
    "pipeline": "gradweave: two micro-batches through a pipeline; a single process has all stages, and nothing to gain",
}
_MICROBATCHES = 2


def baseline_of(optimizer: OptimizerName) -> StockForm:
    """Return the form of an optimizer that a user would pick today."""
    return "fused" if optimizer in FUSED_KERNELS else "foreach"


class PipedStep:
    """A pipeline with all of its stages in one process, taken as a whole step.

    Args:
        model: An ``nn.Sequential``.
        optimizer: Optimizer of its parameters.
        objective: Returns the loss of a model on a batch.
        max_norm: Norm to clip gradients to; None for no clipping.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        objective: Callable[..., torch.Tensor],
        max_norm: float | None,
    ) -> None:
        device = next(model.parameters()).device
        self._owns_group = not dist.is_initialized()
        if self._owns_group:
            # A store in memory: a group of one process needs neither an address nor a port.
            backend = "nccl" if device.type == "cuda" else "gloo"
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
        self._optimizer, self._max_norm = optimizer, max_norm
        self._recorder: Callable[[Kind], AbstractContextManager[None]] | None = None
        try:
            self._pipe = Pipeline(
                model,  # type: ignore[arg-type]
                # The objective calls a model; the pipeline has its output already.
                lambda output, target: objective(nn.Identity(), output, target),
                microbatches=_MICROBATCHES,
                policy="fast_forward",
                device=device,
            )
        except BaseException:
            self._destroy_group()
            raise

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Take a step; return the mean of the micro-batches' losses."""
        with self._recorded(Kind.X):
            loss: Any = self._pipe.step(x, y)
        with self._recorded(Kind.U):
            if self._max_norm is not None:
                self._pipe.clip_grad_norm_(self._max_norm)
            self._optimizer.step()
            self._optimizer.zero_grad()
        taken: torch.Tensor = loss.detach()
        return taken

    def record(self, recorder: Callable[[Kind], AbstractContextManager[None]] | None) -> None:
        """Record forward and backward, which are one part here, and the update; None stops recording."""
        self._recorder = recorder

    def close(self) -> None:
        """Close the pipeline and the process group that was made for it."""
        self._pipe.close()
        self._destroy_group()

    def _recorded(self, kind: Kind) -> AbstractContextManager[None]:
        return nullcontext() if self._recorder is None else self._recorder(kind)

    def _destroy_group(self) -> None:
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()


class Variant:
    """One way to train a model: the form of its optimizer, and the technique attached to it.

    Args:
        mode: A mode of :data:`MODES`.
        model: The model to train.
        optimizer: A name of :data:`OPTIMIZERS`.
        objective: Returns the loss of the model on a batch; for modes that take whole steps.
        lr: Learning rate (default: the optimizer's usual one).
        max_norm: Norm to clip gradients to; for modes that take whole steps.

    Attributes:
        trained: The model to call: the model itself, or its wrapper.
        fusion: The attached fusion, if any; likewise ``reordering`` and ``daso``.
        whole_step: Takes a whole step, in modes that do.
    """

    def __init__(
        self,
        mode: Mode,
        model: nn.Module,
        optimizer: OptimizerName,
        objective: Callable[..., torch.Tensor],
        lr: float | None = None,
        max_norm: float | None = None,
    ) -> None:
        if optimizer not in OPTIMIZERS:
            raise ArgumentError("--optimizer", optimizer, f"use one of {', '.join(OPTIMIZERS)}")
        if mode == "fused" and optimizer not in FUSED_KERNELS:
            raise ArgumentError("--modes", mode, f"torch has no fused form of {optimizer}; use foreach")
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
            if mode == "backward" or mode == "forward" or mode == "auto":
                self.fusion = fuse(model, self.optimizer, mode)
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
        """Step each parameter in a hook that runs once its gradient is there: the well-known recipe to save memory."""
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
        """Learning rate at the start."""
        return float(self.optimizers[0].param_groups[0]["lr"])

    @property
    def clips(self) -> bool:
        """Whether all gradients exist together before the update, so that their common norm can clip them."""
        return self.mode not in ("hook", "backward")

    def step(self) -> None:
        """End a training step."""
        if not self._hooked:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def finish(self) -> None:
        """Apply pending updates and detach from the model."""
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
        """Return the variant in a line, with the reason of a choice."""
        attached = self.fusion or self.reordering
        return attached.explain() if attached is not None else DESCRIPTIONS[self.mode]


def _form(name: str) -> dict[str, Any]:
    """Return the arguments of an optimizer that select a stock form."""
    if name == "fused":
        return {"fused": True}
    return {"foreach": name == "foreach"}
