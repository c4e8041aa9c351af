"""Catching a layer's vectors while a model trains.

A hook behind each covered layer lets its output pass through an autograd function that returns it as
it is. The function's backward adds the sums of the layer's input, taken in forward, of its output's
gradient, and the number of places to a *record*: one flat tensor per layer, kept in the optimizer's
state of the layer's weight, which ``step()`` reads and sets to zero.

Why so, and not by hooks that keep tensors, or a probe parameter, or the bias' gradient:

- What is added in backward is added as often as the gradient is: once under activation checkpointing
  (whose forward runs twice), once per micro-batch and per call of a shared layer, never in an
  evaluation, under ``no_grad()`` or in a forward whose loss is thrown away.
- It is plain tensor code that writes to a tensor the graph gets as an input, so that
  ``torch.compile(fullgraph=True)`` takes it, and ``compile()``, which wants what a step reads to be
  in the optimizer's state.
- Sums are in float32 whatever autocast does, of few samples where these are wanted (a full batch's
  output vector is zero in front of a BatchNorm), and neither the model nor the optimizer's groups
  have parameters in them that nobody asked for.

On a GPU, outside of compilers, kernels do all this: see :mod:`gradweave.optim.kernels.gpu_statistics`. What they have
caught is added to records at the end of backward.

Sums add up over micro-batches and ranks; divided by the number of places they are the means over all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.nn.functional import pad

from gradweave._compat.eager import (
    function_transform,
    gets_gradient,
    has_one_hook,
    watchers,
)
from gradweave._runtime.interception import weight_gradients_are_split
from gradweave.errors import GradweaveError
from gradweave.optim.kernels.gpu_statistics import GpuStatistics, observe_call
from gradweave.optim.statistics.geometry import Layout


class _Pass(torch.autograd.Function):
    """Lets an output pass, and adds to a record in backward."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, sums: torch.Tensor, record: torch.Tensor, tap: Tap, share: float,
                places: tuple[int, ...], mask: torch.Tensor | None) -> torch.Tensor:  # fmt: skip
        """Not a view of ``y``, which in-place activations could not change."""
        ctx.save_for_backward(sums)
        ctx.record, ctx.mask = record, mask
        ctx.tap, ctx.share, ctx.places = tap, share, places
        ctx.is_apart = weight_gradients_are_split()
        return y.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Adds up the sums of the input, the places, and the sums of the gradient."""
        (sums,) = ctx.saved_tensors
        tap = ctx.tap
        if not is_compiling() and not watchers() and not tap.is_counted(is_apart=ctx.is_apart):
            return gradient, None, None, None, None, None, None
        with torch.no_grad():
            if tap.with_outputs:
                samples = tap.output_count(gradient)
                outputs = tap.layout.output_sums(gradient.detach(), samples, ctx.places, ctx.mask)
                sums = torch.cat((sums, outputs.to(sums.dtype) * ctx.share))
            ctx.record.add_(sums.to(ctx.record.dtype))
        return gradient, None, None, None, None, None, None


@dataclass(frozen=True)
class Catching:
    """What is caught of layers.

    Attributes:
        outputs: Whether the outputs' gradients, besides the inputs.
        input_samples: How many of a batch's first samples inputs are looked at of; None for all.
        output_samples: The same for outputs' gradients.
        per_sample: Whether outputs' sums are scaled to what all samples would give.
        words: Whether a head that has a row for each word of an embedding has vectors.
    """

    outputs: bool
    input_samples: int | None = None
    output_samples: int | None = None
    per_sample: bool = True
    words: bool = True


class Tap:
    """The hook of one layer.

    Args:
        layout: Of the layer.
        weight: Its weight.
        catching: What is caught.
        masking: Where the padding mask is, for all layers.
        gpu_statistics: What layers do together.

    Attributes:
        by_kernels: Whether kernels may catch what :meth:`passed` would.
    """

    by_kernels = True

    def __init__(
        self, layout: Layout, weight: nn.Parameter, catching: Catching, masking: Masking, gpu_statistics: GpuStatistics
    ) -> None:
        self.layout = layout
        self.weight = weight
        self.shape = weight.shape
        self.catching = catching
        self.with_outputs = catching.outputs
        self.masking = masking
        self.record: torch.Tensor | None = None
        self.gpu_statistics = gpu_statistics
        self.plans: dict[Any, Any] = {}
        self.last_plan: Any = None

    def use(self, record: torch.Tensor | None) -> None:
        """Has what is caught added to a record; nothing is caught without one."""
        self.record, self.last_plan = record, None

    def new_record(self, weight: torch.Tensor) -> torch.Tensor:
        """A record with nothing in it."""
        dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        return torch.zeros(self.record_size, dtype=dtype, device=weight.device)

    @property
    def record_size(self) -> int:
        """How long a record is: inputs, their number, and outputs if these are caught."""
        layout = self.layout
        return layout.groups * (layout.inputs + (layout.outputs if self.with_outputs else 0)) + 1

    def count_of(self, record: torch.Tensor) -> torch.Tensor:
        """Of how many places a record is."""
        return record[self.layout.groups * self.layout.inputs]

    @property
    def tells_rows_apart(self) -> bool:
        """Whether it matters which sample a row is of, or which rows are padding."""
        samples = self.catching.input_samples, self.catching.output_samples if self.with_outputs else None
        return self.masking.mask is not None or samples != (None, None)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], y: Any) -> Any:
        """Behind a layer's forward."""
        if self.record is None or not y.requires_grad:
            return None
        weight = self.weight_of(module)
        compiling = is_compiling()
        if not weight.requires_grad or (not compiling and function_transform() is not None):
            return None
        if not compiling and self.gpu_statistics.on_forward is not None:
            self.gpu_statistics.on_forward()
        if weight.shape != self.shape:
            raise GradweaveError(
                f"a layer's weight has the shape {tuple(weight.shape)}, which was {tuple(self.shape)} when the "
                "optimizer was made; make a new one after changing a model"
            )
        if not compiling and weight is not self.weight and weight.is_leaf:  # as under torch.func.functional_call
            return None
        x = args[0] if args else kwargs["input"]
        if isinstance(x, torch.Tensor) and x.is_nested:
            return None
        if (
            not compiling
            and self.by_kernels
            and observe_call(self, x, y, is_alone=has_one_hook(module), is_apart=weight_gradients_are_split())
        ):
            return None
        return self.passed(y, x)

    def is_counted(self, *, is_apart: bool) -> bool:
        """Whether the backward that is now running is one of those by which the weight gets a gradient.

        Args:
            is_apart: Whether weight gradients are computed apart from backward, which then does not say.
        """
        return is_apart or gets_gradient(self.weight)

    def weight_of(self, module: nn.Module) -> torch.Tensor:
        """The weight whose gradient the vectors belong to."""
        own = module._parameters.get("weight")
        return module.weight if own is None else own  # type: ignore[return-value]

    def input_sums(self, x: Any) -> tuple[torch.Tensor, float | torch.Tensor]:
        """Sums of an input over places, and how many these are."""
        return self.layout.input_sums(x.detach(), self.catching.input_samples, self.masking.mask)

    def output_count(self, y: torch.Tensor) -> int | None:
        """How many of a batch's samples the output vector is made of; None for all."""
        samples = self.catching.output_samples
        if samples is None:
            return None
        return min(samples, self.layout.batch_size(y))

    def share_of(self, y: torch.Tensor) -> float:
        """What outputs' sums are multiplied by, to be those of all samples."""
        size = self.layout.batch_size(y)
        looked_at = self.output_count(y) or size
        return size / looked_at if self.catching.per_sample and looked_at else 1.0

    def passed(self, y: torch.Tensor, x: Any) -> torch.Tensor:
        """An output, with this layer's vectors to be caught in its backward."""
        with torch.no_grad(), torch.autocast(y.device.type, enabled=False):
            sums, count = self.input_sums(x)
            counted = pad(sums, (0, 1), value=count) if isinstance(count, float) else torch.cat((sums, count.view(1)))
        share = self.share_of(y)
        places = tuple(x.shape[-len(self.layout.windows) :]) if self.layout.windows else ()
        result: torch.Tensor = _Pass.apply(  # type: ignore[no-untyped-call]
            y, counted, self.record, self, share, places, self.masking.mask
        )
        return result

    def __deepcopy__(self, _: Any) -> Inert:
        return Inert()

    def __reduce__(self) -> Any:
        return Inert, ()


class Inert:
    """What a copied model has in the place of a tap: it belongs to no optimizer."""

    def __call__(self, *_: Any) -> None:
        """Changes nothing."""


class Masking:
    """Which rows of linear layers' inputs count, while a model runs."""

    def __init__(self) -> None:
        self.mask: torch.Tensor | None = None

    def __deepcopy__(self, _: Any) -> Masking:
        return Masking()


class Masked:
    """Context in which rows that are padding are left out of linear layers' vectors."""

    def __init__(self, masking: Masking, mask: torch.Tensor) -> None:
        self._masking = masking
        self._mask = mask
        self._outside: list[torch.Tensor | None] = []

    def __enter__(self) -> None:
        self._outside.append(self._masking.mask)
        self._masking.mask = self._mask

    def __exit__(self, *_: object) -> None:
        self._masking.mask = self._outside.pop()
