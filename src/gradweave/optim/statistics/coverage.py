"""Layers of a model that have vectors: their hooks, and the check that these run."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gradweave._logging import announce
from gradweave._runtime.claims import PipelinePart, pipeline_part
from gradweave.errors import GradweaveError
from gradweave.optim.averaging import Ranks
from gradweave.optim.kernels.gpu_statistics import GpuStatistics
from gradweave.optim.kernels.launch import is_capturing
from gradweave.optim.state import ParameterState
from gradweave.optim.statistics.attention import (
    InputProjectionTap,
    hook_output_projections,
    input_projection,
    uncovered_output_projections,
)
from gradweave.optim.statistics.geometry import Layout, layout_of
from gradweave.optim.statistics.hooks import CurrentMask, StatisticsOptions, Tap


@dataclass(frozen=True)
class CoveredLayer:
    """A layer with a tap.

    Attributes:
        name: Its name in the model.
        module: The layer.
        weight: Its weight.
        bias: Its bias, if that is a column of the layer's matrices.
        tap: Its hook.
    """

    name: str
    module: nn.Module
    weight: nn.Parameter
    bias: nn.Parameter | None
    tap: Tap


class Capture:
    """The taps of a model's layers.

    Args:
        model: The model.
        options: The statistics to collect.
        ranks: The ranks, which are told of each forward; None if they are not needed.

    Attributes:
        layers: The layers with taps.
        masking: The holder of the padding mask.
    """

    def __init__(self, model: nn.Module, options: StatisticsOptions, ranks: Ranks | None = None) -> None:
        self.masking = CurrentMask()
        self._gpu_statistics = GpuStatistics(None if ranks is None else ranks.note_forward)
        self.layers = []
        part = pipeline_part(model)
        head = None if options.words else head_over_words(model, part)
        tied = frozenset() if part is None else part.tied
        for name, module, layout, weight, bias in coverable_layers(
            model, with_attention=options.per_sample, left=head, tied=tied
        ):
            tap = Tap(layout, weight, options, self.masking, self._gpu_statistics)
            self.layers.append(CoveredLayer(name, module, weight, bias, tap))
        for name, module in model.named_modules() if options.per_sample else ():
            parts = input_projection(module)
            if parts is None or not parts[0].requires_grad:
                continue
            weight, bias = parts
            bias = bias if bias is not None and bias.requires_grad else None
            if options.outputs and bias is None:
                announce(f"optim: no output vectors of {name}, which has no bias; the first-order rule updates it")
                continue
            self.layers.append(
                CoveredLayer(
                    name, module, weight, bias, InputProjectionTap(weight, options, self.masking, self._gpu_statistics)
                )
            )
        self._handles: list[Any] = []
        try:
            for layer in self.layers:
                self._handles.append(layer.module.register_forward_hook(layer.tap, with_kwargs=True))
            self._handles += hook_output_projections(model, [(layer.module, layer.tap) for layer in self.layers])
        except BaseException:
            self.remove()
            raise

    def forget(self) -> None:
        """Drop statistics that a failed backward has left in the kernels' side."""
        self._gpu_statistics.discard()

    def remove(self) -> None:
        """Remove the hooks from the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def head_over_words(model: nn.Module, part: PipelinePart | None = None) -> nn.Linear | None:
    """Return the last linear layer, if it has a row for each word of an embedding; None otherwise.

    In a pipeline, last layer and embeddings are those of the whole model. Rows of rare words have gradients that are
    small and mostly noise: with one length for all rows these would not learn.
    """
    inside = {id(module.out_proj) for module in model.modules() if isinstance(module, nn.MultiheadAttention)}
    heads = [module for module in model.modules() if isinstance(module, nn.Linear) and id(module) not in inside]
    shapes = {tuple(module.weight.shape) for module in model.modules() if isinstance(module, nn.Embedding)}
    if part is not None:
        shapes = set(part.embeddings) if part.has_last_linear else set()
    return heads[-1] if heads and tuple(heads[-1].weight.shape) in shapes else None


def coverable_layers(
    model: nn.Module,
    *,
    with_attention: bool = False,
    left: nn.Module | None = None,
    tied: frozenset[int] = frozenset(),
) -> Iterator[tuple[str, nn.Module, Layout, nn.Parameter, nn.Parameter | None]]:
    """Yield the layers that can have vectors, with name, layout, weight and bias; announce others with a weight matrix.

    Args:
        model: The model.
        with_attention: Whether the projections of attention have vectors.
        left: A layer to leave out.
        tied: The ids of weights that layers on other ranks of a pipeline have too.
    """
    owners: dict[int, int] = {}
    for module in model.modules():
        for p in module.parameters(recurse=False):
            owners[id(p)] = owners.get(id(p), 0) + 1
    inside_attention = uncovered_output_projections(model, with_attention=with_attention)
    left_out: dict[str, None] = {}
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        layout = None if id(module) in inside_attention else layout_of(module)
        weight = own.get("weight")
        if layout is None or weight is None:
            covered_elsewhere = with_attention and input_projection(module) is not None
            if any(p.dim() >= 2 for p in own.values()) and not covered_elsewhere:
                left_out.setdefault(type(module).__name__)
            continue
        if owners[id(weight)] > 1 or id(weight) in tied:
            left_out.setdefault(f"{type(module).__name__} with a tied weight")
            continue
        if module is left:
            left_out.setdefault(f"{name}, which has a row for each word of an embedding")
            continue
        if not weight.requires_grad or weight.numel() == 0:
            continue
        bias = own.get("bias")
        is_shared = bias is not None and (owners[id(bias)] > 1 or id(bias) in tied)
        if bias is not None and (is_shared or not bias.requires_grad or not layout.takes_bias):
            bias = None
        yield name, module, layout, weight, bias
    if left_out:
        announce(f"optim: no vectors of {', '.join(left_out)}; the first-order rule updates their weights")


class FirstStepCheck:
    """A check, in the first step that moves a weight, that hooks have run in the layers whose weights have gradients.

    They do not where Dynamo has compiled a model before it had hooks: it does not look for new ones. Whether there was
    a backward at all, rather than gradients that were assigned, is told by hooks on the autograd nodes that accumulate
    gradients. (Not by hooks on the parameters themselves: others count these, and with them autograd delivers gradients
    in another way.)

    Args:
        layers: The layers with hooks.
        hold_nodes: Whether autograd's nodes may be held until then, without which every backward that no hook has seen
            counts as gradients that were assigned. A node belongs to the stream that it was made on; those who train
            on another, as before the capture of a step, are warned of it by torch.

    Attributes:
        is_done: Whether the check has been made, once and for all.
    """

    def __init__(self, layers: Sequence[CoveredLayer], *, hold_nodes: bool = True) -> None:
        self.is_done = False
        self._layers = layers
        # A list that the hooks share with this object: nodes live as long as their leaves, and must not keep more.
        had_backward: list[bool] = []
        self._had_backward = had_backward
        weights = [layer.weight for layer in layers if hold_nodes and layer.weight.requires_grad]
        self._nodes = [torch.autograd.graph.get_gradient_edge(weight).node for weight in weights]
        self._handles = [node.register_prehook(lambda _: _note(had_backward)) for node in self._nodes]

    def close(self) -> None:
        """Remove the hooks from autograd's nodes, and release these."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._nodes.clear()
        self._layers = ()

    def run(self, states: Mapping[torch.Tensor, ParameterState]) -> None:
        """Raise GradweaveError if a backward has left gradients and no hook has run; warn if some have not.

        Waits for the device, once.

        Args:
            states: States of the layers' weights.
        """
        used = [layer for layer in self._layers if layer.weight.grad is not None and layer.tap.record is not None]
        if not used or is_capturing(used[0].weight.device):
            return
        counts = [layer.tap.count_of(states[layer.weight]["record"]).to("cpu") for layer in used]
        unseen = [layer.name for layer, count in zip(used, counts, strict=True) if not float(count) > 0]
        moved = not unseen or any(
            bool((layer.weight.grad != 0).any()) for layer in used if layer.weight.grad is not None
        )
        if not moved:
            return  # checkpoints take a step with gradients of zeros, to have state created
        had_backward = bool(self._had_backward)
        self.is_done = True
        self.close()
        if len(unseen) == len(used) and had_backward:
            raise GradweaveError(
                "there was a backward, and no hook of a layer has run: if the model was compiled and run before this "
                "optimizer was made, call torch.compiler.reset() now; under torch.func and the like layers are not "
                "seen, and need another optimizer"
            )
        if unseen:
            named = ", ".join(unseen[:3]) + (f" and {len(unseen) - 3} more" if len(unseen) > 3 else "")
            announce(
                f"optim: {named} have gradients, and their inputs were not seen in the first step: until they are, "
                "these gradients are used as they are",
                level=logging.WARNING,
            )


def _note(had_backward: list[bool]) -> None:
    if not had_backward:
        had_backward.append(True)
