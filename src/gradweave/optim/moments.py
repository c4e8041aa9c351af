"""Catching second moments of layers' inputs and outputs' gradients, for the dense optimizers.

As :mod:`gradweave.optim.capture` does with vectors: what backward adds to a layer's moments is added
as often as its gradient is. Patches are made here, as these methods need them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import unfold

from gradweave.optim.capture import Inert
from gradweave.optim.coverage import coverable
from gradweave.optim.layouts import LINEAR, Layout, vector_dtype
from gradweave.optim.ranks import Ranks


class _Pass(torch.autograd.Function):
    """Lets an output pass, and adds to moments in backward."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, inputs: torch.Tensor, tap: MomentTap, samples: int) -> torch.Tensor:
        """Not a view of ``y``, which in-place activations could not change."""
        ctx.save_for_backward(inputs)
        ctx.tap, ctx.samples = tap, samples
        return y.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Adds up moments, and how many samples and places they are of."""
        (inputs,) = ctx.saved_tensors
        ctx.tap.add(inputs, gradient.detach(), ctx.samples)
        return gradient, None, None, None


class MomentTap:
    """The hook of one layer: a linear one, or a Conv2d without groups.

    Args:
        module: The layer.
        layout: Its layout.
        outputs: Whether moments of outputs' gradients are wanted too.
        with_bias: Whether the bias is a column.
        ranks: To be told of each forward.
    """

    def __init__(self, module: nn.Module, layout: Layout, *, outputs: bool, with_bias: bool, ranks: Ranks) -> None:
        self.ranks = ranks
        self.layout = layout
        self.outputs = outputs
        self.with_bias = with_bias
        self.wanted = True
        self.inputs_sum: torch.Tensor | None = None
        self.outputs_sum: torch.Tensor | None = None
        self.places = 0
        self.samples = 0
        self._options: dict[str, Any] = {}
        if layout.kind != LINEAR:
            names = ("kernel_size", "dilation", "padding", "stride")
            self._options = {name: getattr(module, name) for name in names}

    def __call__(self, module: nn.Module, args: tuple[Any, ...], y: torch.Tensor) -> torch.Tensor | None:
        """Behind a layer's forward."""
        if not self.wanted or not torch.is_grad_enabled() or not y.requires_grad:
            return None
        if not module.weight.requires_grad:
            return None
        self.ranks.look()
        x = args[0].detach()
        result: torch.Tensor = _Pass.apply(y, x, self, len(x))  # type: ignore[no-untyped-call]
        return result

    def add(self, x: torch.Tensor, gradient: torch.Tensor, samples: int) -> None:
        """Adds the moments of a batch."""
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            rows = self._rows(x)
            self.inputs_sum = _added(self.inputs_sum, rows.t() @ rows)
            if self.outputs:
                dtype = vector_dtype(gradient)
                is_linear = self.layout.kind == LINEAR
                wide = gradient if is_linear else gradient.flatten(2).transpose(1, 2)
                wide = wide.reshape(-1, self.layout.outputs).to(dtype)
                self.outputs_sum = _added(self.outputs_sum, wide.t() @ wide)
            self.places += len(rows)
            self.samples += samples

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(vector_dtype(x))
        if self._options:
            x = unfold(x, **self._options).transpose(1, 2)
        rows = x.reshape(-1, self.layout.inputs)
        return torch.cat((rows, torch.ones_like(rows[:, :1])), 1) if self.with_bias else rows

    def caught(self, weight: torch.Tensor) -> Moments:
        """What was caught, in a form that adds up over ranks; zeros where nothing was."""
        dtype = vector_dtype(weight)
        inputs, outputs = self.inputs_sum, self.outputs_sum
        if inputs is None:
            inputs = _square_of_zeros(self.layout.inputs + int(self.with_bias), dtype, weight.device)
        if self.outputs and outputs is None:
            outputs = _square_of_zeros(self.layout.outputs, dtype, weight.device)
        if outputs is not None:
            outputs = outputs * float(self.samples) ** 2
        counts = torch.tensor([self.places, self.samples], dtype=inputs.dtype).to(weight.device)
        return Moments(inputs, outputs, counts)

    def clear(self) -> None:
        """Forgets what was caught."""
        self.inputs_sum = self.outputs_sum = None
        self.places = self.samples = 0

    def __deepcopy__(self, _: Any) -> Inert:
        return Inert()

    def __reduce__(self) -> Any:
        return Inert, ()


@dataclass(frozen=True)
class Moments:
    """Sums over places of a layer.

    Attributes:
        inputs: Outer products of inputs.
        outputs: Those of the gradients that each sample's own loss has with respect to outputs.
        counts: Places and samples.
    """

    inputs: torch.Tensor
    outputs: torch.Tensor | None
    counts: torch.Tensor

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All of it."""
        return [self.inputs, self.counts] if self.outputs is None else [self.inputs, self.outputs, self.counts]


def _square_of_zeros(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros(size, size, dtype=dtype, device=device)


def _added(total: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
    return new if total is None else total + new


@dataclass(frozen=True)
class MomentLayer:
    """A layer with a tap, its weight, and the bias that is a column of it."""

    module: nn.Module
    weight: nn.Parameter
    bias: nn.Parameter | None
    tap: MomentTap


class MomentCapture:
    """The taps of a model's layers."""

    def __init__(self, model: nn.Module, *, outputs: bool, ranks: Ranks) -> None:
        self.layers: list[MomentLayer] = []
        for _, module, layout, weight, bias in coverable(model):
            if layout.kind == LINEAR or _is_plain(module):
                tap = MomentTap(module, layout, outputs=outputs, with_bias=bias is not None, ranks=ranks)
                self.layers.append(MomentLayer(module, weight, bias, tap))
        self._handles = [layer.module.register_forward_hook(layer.tap) for layer in self.layers]

    def remove(self) -> None:
        """Takes the taps off the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _is_plain(module: nn.Module) -> bool:
    """Whether patches can be made by torch's unfold."""
    return (
        isinstance(module, nn.Conv2d)
        and module.groups == 1
        and module.padding_mode == "zeros"
        and not isinstance(module.padding, str)
    )
