"""One variant of a training job, run in blocks of steps so that variants can take turns."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn

from gradweave.compare.model_errors import errors_of_model
from gradweave.compare.recording import Recorder
from gradweave.compare.variants import OTHER_RULES, STOCK, Mode, OptimizerName, Variant
from gradweave.compare.workloads import Batches, Workload
from gradweave.errors import ArgumentError
from gradweave.schedule.tasks import Kind
from gradweave.schedule.timeline import Timeline

CPU = torch.device("cpu")
PARTS = ("forward", "backward", "update")
_IN_A_STEP = "fails in a training step"
_KINDS = {Kind.F: "forward", Kind.X: "backward", Kind.W: "backward", Kind.U: "update"}


@dataclass(frozen=True)
class Setting:
    """The training job, equal for all variants.

    Attributes:
        workload: Model, data and loss.
        optimizer: Name of the optimizer.
        batch: Samples per step to ask the workload for.
        device: Device to train on.
        dtype: Type to compute in; any but float32 by autocast.
        max_norm: Norm to clip gradients to (default: no clipping).
        seed: Seed of weights, data and dropout.
        lr: The optimizer's learning rate (default: the workload's, or the optimizer's usual one).
        other_lr: Learning rate of modes that train by another rule (default: their own).
    """

    workload: Workload
    optimizer: OptimizerName = "adamw"
    batch: int = 32
    device: torch.device = CPU
    dtype: torch.dtype = torch.float32
    max_norm: float | None = None
    seed: int = 0
    lr: float | None = None
    other_lr: float | None = None

    def learning_rate(self, mode: Mode) -> float | None:
        """Return the learning rate of a mode; None leaves it to the optimizer."""
        if mode in OTHER_RULES:
            return self.other_lr
        return self.workload.learning_rates.get(self.optimizer) if self.lr is None else self.lr


@dataclass
class Trial:
    """A variant in training, and its measurements.

    Attributes:
        label: The variant's name in tables.
        mode: The variant's mode.
        setting: The training job.
        blocks: Seconds per step of each timed block.
        parts: Milliseconds of forward, backward and update of each recorded step; empty if a step is taken whole.
        losses: Loss of every step.
        peak_bytes: Most memory in use on a GPU, with its own weights and optimizer state but not those of other trials.
        timeline: Timeline of the recorded steps.
    """

    label: str
    mode: Mode
    setting: Setting
    blocks: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})
    losses: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    timeline: Timeline | None = None

    def __post_init__(self) -> None:
        setting = self.setting
        torch.manual_seed(setting.seed)
        self._autocast = setting.dtype is not torch.float32
        name = setting.workload.name
        with errors_of_model(name, "cannot be built"):
            self.model: nn.Module = setting.workload.make_model().to(setting.device).train()
        if not any(p.requires_grad for p in self.model.parameters()):
            raise ArgumentError("model", name, "has no parameters to train, or all are frozen")
        rate = setting.learning_rate(self.mode)
        with self._errors("an optimizer cannot be made for it"):
            self.variant = Variant(self.mode, self.model, setting.optimizer, self.loss, rate, setting.max_norm)
        self._rng = self._rng_state()
        self._step = 0
        self._pending: list[torch.Tensor] = []

    def _errors(self, what_failed: str) -> AbstractContextManager[None]:
        """Report errors as the model's in stock modes; elsewhere they may be gradweave's, and stay visible."""
        return errors_of_model(self.setting.workload.name, what_failed) if self.mode in STOCK else nullcontext()

    def _rng_state(self) -> list[torch.Tensor]:
        device = self.setting.device
        return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]

    def _set_rng_state(self, state: list[torch.Tensor]) -> None:
        torch.set_rng_state(state[0])
        if len(state) > 1:
            torch.cuda.set_rng_state(state[1], self.setting.device)

    def run_block(
        self,
        batches: Batches,
        steps: int,
        *,
        timed: bool,
        advance: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Take some steps; random numbers continue where this trial's last block ended, whatever ran in between.

        Args:
            batches: Batches to take in turn.
            steps: Number of steps.
            timed: Whether to measure them.
            advance: Called with the number of steps that are done: after each step, or once at the end of timed ones.
        """
        device = self.setting.device
        self._set_rng_state(self._rng)
        before = _allocated(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        synchronize(device)
        began = time.perf_counter()
        for _ in range(steps):
            with self._errors(_IN_A_STEP):
                self._one_step(batches, None)
            if not timed:
                advance(1)
        synchronize(device)
        if timed:
            self.blocks.append((time.perf_counter() - began) / steps)
            advance(steps)
        if device.type == "cuda" and timed:
            # All trials are on the device at once: the growth during the block is this one's alone.
            own = torch.cuda.max_memory_allocated(device) - before + self._own_bytes()
            self.peak_bytes = max(self.peak_bytes or 0, own)
        self._rng = self._rng_state()
        self._note_losses()

    def record(self, batches: Batches, steps: int) -> None:
        """Take some steps whose parts are timed; they train, but do not count towards ``blocks``."""
        self._set_rng_state(self._rng)
        recorder = Recorder(self.setting.device)
        if self.variant.fusion is not None:
            self.variant.fusion.record(recorder.update)
        if self.variant.reordering is not None:
            self.variant.reordering.record(recorder.weight_gradient)
        if self.variant.whole_step is not None:
            self.variant.whole_step.record(recorder.part)
        try:
            for number in range(steps):
                recorder.step = number
                with self._errors(_IN_A_STEP):
                    self._one_step(batches, recorder)
        finally:
            if self.variant.fusion is not None:
                self.variant.fusion.record(None)
            if self.variant.reordering is not None:
                self.variant.reordering.record(None)
            if self.variant.whole_step is not None:
                self.variant.whole_step.record(None)
        self._rng = self._rng_state()
        self._note_losses()
        if self.variant.whole_step is not None:
            title = f"{self.label}, one operation at a time" if self.mode == "compile" else self.label
            self.timeline = recorder.timeline(title)
            return
        self.timeline = recorder.timeline(self.label)
        for number in range(1, steps):
            spans = [span for span in self.timeline.spans if span.task.step == number]
            # Weight gradients on another stream run at the same time as the parts: they lengthen none of them.
            spans = [span for span in spans if span.task.kind is not Kind.W or span.lane == spans[0].lane]
            for part in PARTS:
                own = (span for span in spans if _KINDS[span.task.kind] == part)
                self.parts[part].append(1e3 * sum(span.end - span.start for span in own))

    def _note_losses(self) -> None:
        """Read the losses of the last block; reading each at its step would synchronize with the device."""
        with self._errors(_IN_A_STEP):
            self.losses += [float(loss) for loss in self._pending]
        self._pending = []

    def _one_step(self, batches: Batches, recorder: Recorder | None) -> None:
        """Take one step, part by part if a recorder is given."""
        x, y = batches[self._step % len(batches)]
        self._step += 1

        def part(kind: Kind) -> AbstractContextManager[None]:
            return recorder.part(kind) if recorder is not None else nullcontext()

        setting = self.setting
        if self.variant.whole_step is not None:
            with self._precision() if self.mode == "pipeline" else nullcontext():
                self._pending.append(self.variant.whole_step(x, y))
            return
        with part(Kind.F):
            loss = self.loss(self.variant.trained, x, y)
        with part(Kind.X):
            loss.backward()
        with part(Kind.U):
            if setting.max_norm is not None and self.variant.clips:
                nn.utils.clip_grad_norm_(self.model.parameters(), setting.max_norm)
            self.variant.step()
        self._pending.append(loss.detach())

    def loss(self, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss of a model on a batch, in the setting's precision."""
        with self._precision():
            return self.setting.workload.loss(model(x), y)

    def _precision(self) -> AbstractContextManager[None]:
        if not self._autocast:
            return nullcontext()
        return torch.autocast(self.setting.device.type, self.setting.dtype)

    @property
    def is_finite(self) -> bool:
        """Whether every loss so far and every weight is finite."""
        weights = (p for p in self.model.parameters() if p.is_floating_point() or p.is_complex())
        return all(map(math.isfinite, self.losses)) and all(bool(p.isfinite().all()) for p in weights)

    def finish(self) -> None:
        """End the training; the model's weights are then final."""
        self.variant.finish()

    def _own_bytes(self) -> int:
        """Return the bytes of weights, buffers and optimizer state."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        optimizers = self.variant.optimizers
        for optimizer in optimizers:
            for state in optimizer.state.values():
                tensors += [value for value in state.values() if isinstance(value, torch.Tensor) and value.is_cuda]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def synchronize(device: torch.device) -> None:
    """Wait for a GPU to finish all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
