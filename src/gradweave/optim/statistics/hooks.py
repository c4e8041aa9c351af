"""Collecting the statistics of a layer's inputs and outputs while a model trains.

A forward hook of each covered layer passes its output through an autograd function that returns it as it is. The
function's backward adds the sums of the layer's input, taken in forward, the number of places, and maybe the sums of
its output's gradient to a *record*: one flat tensor per layer, kept in the optimizer's state of the layer's weight,
which ``step()`` reads and sets to zero.

Other designs would be hooks that keep tensors, a probe parameter, or the bias' gradient. The reasons for this one:

- Statistics are added in backward as often as the gradient is: once under activation checkpointing (whose forward runs
  twice), once per micro-batch and per call of a shared layer, never in an evaluation, under ``no_grad()`` or in a
  forward whose loss is discarded.
- It is plain tensor code that writes to a tensor that is an input of the graph. So ``torch.compile(fullgraph=True)``
  accepts it, and so does ``compile()``, which requires that everything a step reads is in the optimizer's state.
- Sums are in float32 under autocast too, and may be of a few samples only (a full batch's output vector is zero before
  a BatchNorm); and neither the model nor the optimizer's groups get parameters that the user did not make.

On a GPU, outside of compilers, kernels do all this: see :mod:`gradweave.optim.kernels.gpu_statistics`. Their sums are
added to records at the end of backward.

Sums add up over micro-batches and ranks; divided by the number of places they are the means over all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.nn.functional import pad

from gradweave._compat.autograd import gets_gradient
from gradweave._compat.functions import dispatch_modes, function_transform, is_being_traced
from gradweave._compat.modules import has_one_hook, own_parameter
from gradweave._runtime.interception import weight_gradients_are_split
from gradweave.errors import GradweaveError
from gradweave.optim.kernels.gpu_statistics import GpuStatistics, observe_call
from gradweave.optim.state import wide_dtype
from gradweave.optim.statistics.geometry import Layout


class _Pass(torch.autograd.Function):
    """Return an output as it is, and add its layer's statistics to a record in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        y: torch.Tensor,
        sums: torch.Tensor,
        record: torch.Tensor,
        tap: Tap,
        share: float,
        places: tuple[int, ...],
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return ``y.detach()``: an output that is a view of ``y`` to autograd could not be changed in place."""
        ctx.save_for_backward(sums)
        ctx.record, ctx.mask = record, mask
        ctx.tap, ctx.share, ctx.places = tap, share, places
        ctx.is_apart = weight_gradients_are_split()  # now: a backward does not run under forward's modes
        return y.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Add the sums of the input, the number of places, and the sums of the gradient to the record."""
        (sums,) = ctx.saved_tensors
        tap = ctx.tap
        # While a compiler or a dispatch mode traces a backward, it counts without asking the engine.
        if not is_compiling() and not dispatch_modes() and not tap.is_counted(is_apart=ctx.is_apart):
            return gradient, None, None, None, None, None, None
        with torch.no_grad():
            if tap.with_outputs:
                samples = tap.output_count(gradient)
                outputs = tap.layout.output_sums(gradient.detach(), samples, ctx.places, ctx.mask)
                sums = torch.cat((sums, outputs.to(sums.dtype) * ctx.share))
            ctx.record.add_(sums.to(ctx.record.dtype))
        return gradient, None, None, None, None, None, None


@dataclass(frozen=True)
class StatisticsOptions:
    """The statistics that are collected.

    Attributes:
        outputs: Whether sums of outputs' gradients are collected, besides those of inputs.
        input_samples: Number of leading samples used for the input statistics (all if None).
        output_samples: Number of leading samples used for the output statistics (all if None).
        per_sample: Whether outputs' sums are scaled up from these samples to the whole batch.
        words: Whether a head with a row for each word of an embedding is covered.
    """

    outputs: bool
    input_samples: int | None = None
    output_samples: int | None = None
    per_sample: bool = True
    words: bool = True


class Tap:
    """The forward hook of one layer.

    Args:
        layout: The layer's layout.
        weight: Its weight.
        options: The statistics to collect.
        masking: The holder of the current padding mask, for all layers of a model.
        gpu_statistics: The kernels' side, which collects the statistics of many layers at once.

    Attributes:
        by_kernels: Whether kernels may collect the statistics instead of :meth:`passed`.
        record: The tensor that statistics are added to; None to collect none.
    """

    by_kernels = True

    def __init__(
        self,
        layout: Layout,
        weight: nn.Parameter,
        options: StatisticsOptions,
        masking: CurrentMask,
        gpu_statistics: GpuStatistics,
    ) -> None:
        self.layout = layout
        self.weight = weight
        self.shape = weight.shape
        self.options = options
        self.with_outputs = options.outputs
        self.masking = masking
        self.record: torch.Tensor | None = None
        self.gpu_statistics = gpu_statistics
        self.plans: dict[Any, Any] = {}
        self.last_plan: Any = None

    def use(self, record: torch.Tensor | None) -> None:
        """Add statistics to a record from now on; None to collect none."""
        self.record, self.last_plan = record, None

    def new_record(self, weight: torch.Tensor) -> torch.Tensor:
        """Return an empty record."""
        return torch.zeros(self.record_size, dtype=wide_dtype(weight), device=weight.device)

    @property
    def record_size(self) -> int:
        """Number of elements of a record: inputs, the number of places, and outputs if they are collected."""
        layout = self.layout
        return layout.groups * (layout.inputs + (layout.outputs if self.with_outputs else 0)) + 1

    def count_of(self, record: torch.Tensor) -> torch.Tensor:
        """Return the number of places that a record consists of."""
        return record[self.layout.groups * self.layout.inputs]

    @property
    def tells_rows_apart(self) -> bool:
        """Whether it matters which sample a row is of, or which rows are padding."""
        samples = self.options.input_samples, self.options.output_samples if self.with_outputs else None
        return self.masking.mask is not None or samples != (None, None)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], y: Any) -> Any:
        """Run after a layer's forward: return its output with statistics to be collected in backward, or None."""
        if self.record is None or not y.requires_grad:
            return None
        weight = self.weight_of(module)
        compiling = is_compiling()
        # torch.func differentiates with respect to other tensors than the layer's weight; no trace has the sums.
        if not weight.requires_grad or (not compiling and (function_transform() is not None or is_being_traced())):
            return None
        if not compiling and self.gpu_statistics.on_forward is not None:
            self.gpu_statistics.on_forward()
        if weight.shape != self.shape:
            raise GradweaveError(
                f"a layer's weight has the shape {tuple(weight.shape)}, which was {tuple(self.shape)} when the "
                "optimizer was made; make a new one after changing a model"
            )
        if not compiling and weight is not self.weight and weight.is_leaf:
            return None  # another weight for the time being, as under torch.func.functional_call
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
        """Return whether the backward that is running gives the weight a gradient.

        It does not in ``backward(inputs=...)`` and ``torch.autograd.grad()`` for other tensors.

        Args:
            is_apart: Whether weight gradients are computed apart from backward, whose engine then cannot tell: each
                backward counts.
        """
        return is_apart or gets_gradient(self.weight)

    def weight_of(self, module: nn.Module) -> torch.Tensor:
        """Return the weight whose gradient the vectors belong to."""
        own = own_parameter(module, "weight")
        return module.weight if own is None else own  # type: ignore[return-value]

    def input_sums(self, x: Any) -> tuple[torch.Tensor, float | torch.Tensor]:
        """Return the sums of an input over places, and the number of places."""
        return self.layout.input_sums(x.detach(), self.options.input_samples, self.masking.mask)

    def output_count(self, y: torch.Tensor) -> int | None:
        """Return the number of a batch's samples that the output statistics are of; None for all."""
        samples = self.options.output_samples
        if samples is None:
            return None
        return min(samples, self.layout.batch_size(y))

    def share_of(self, y: torch.Tensor) -> float:
        """Return the factor that scales outputs' sums up to all samples."""
        size = self.layout.batch_size(y)
        looked_at = self.output_count(y) or size
        return size / looked_at if self.options.per_sample and looked_at else 1.0

    def passed(self, y: torch.Tensor, x: Any) -> torch.Tensor:
        """Return an output whose backward collects this layer's statistics."""
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
    """A copied model's replacement of a tap, since the copy belongs to no optimizer."""

    def __call__(self, *_: Any) -> None:
        """Leave the output as it is."""


class CurrentMask:
    """The holder of the mask that says which rows of linear layers' inputs count, while a model runs."""

    def __init__(self) -> None:
        self.mask: torch.Tensor | None = None

    def __deepcopy__(self, _: Any) -> CurrentMask:
        return CurrentMask()


class MaskContext:
    """A context in which rows that are padding are left out of linear layers' vectors; contexts nest."""

    def __init__(self, masking: CurrentMask, mask: torch.Tensor) -> None:
        self._masking = masking
        self._mask = mask
        self._outside: list[torch.Tensor | None] = []

    def __enter__(self) -> None:
        self._outside.append(self._masking.mask)
        self._masking.mask = self._mask

    def __exit__(self, *_: object) -> None:
        self._masking.mask = self._outside.pop()
