"""Stages: runs of layers, as torch's pipelining runtime calls them."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

from gradweave._compat.tensors import is_view
from gradweave._runtime.dry_run import unseen
from gradweave.errors import GradweaveError
from gradweave.parallel.pipeline.weight_gradients import StageSplit, WeightGradientLedger


class ForwardAutocast:
    """Autocast as the user has set it around a step, for forwards and the loss alone.

    torch's runtime runs forwards and backwards in turn inside of one call. Backward runs without
    autocast, as it does in a training loop whose ``with torch.autocast`` ends before ``backward()``.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device.type
        self._dtype: torch.dtype | None = None

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Return a context for a step in which autocast is off, and known."""
        if not torch.is_autocast_enabled(self._device):
            yield
            return
        self._dtype = torch.get_autocast_dtype(self._device)
        try:
            with torch.autocast(self._device, enabled=False):
                yield
        finally:
            self._dtype = None

    def restored(self) -> AbstractContextManager[Any]:
        """Return the context of a forward: autocast as it was around the step."""
        if self._dtype is None:
            return nullcontext()
        return torch.autocast(self._device, self._dtype)


class StageLayers(nn.Module):
    """The layers of one stage, under the names they have in the whole model.

    What goes from one stage to the next is a tensor, or a tuple of tensors, which the next layer gets as one.
    """

    def __init__(
        self, layers: Iterable[tuple[str, nn.Module]], split: StageSplit | None, autocast: ForwardAutocast
    ) -> None:
        super().__init__()
        self.layers = nn.Sequential(OrderedDict(layers))
        self._split = split
        self._autocast = autocast

    def __deepcopy__(self, memo: dict[int, Any]) -> StageLayers:
        """Return a copy of the layers that leaves its weight gradients where this one does."""
        return StageLayers(copy.deepcopy(list(self.layers.named_children()), memo), self._split, self._autocast)

    def forward(self, *given: Any) -> Any:
        """Run the layers; the weight gradients of linear and convolution calls are left for W."""
        if self._split is not None:
            given = tuple(_Received.apply(x) if x.requires_grad else x for x in given)  # type: ignore[no-untyped-call]
        value = given[0] if len(given) == 1 else given
        with self._autocast.restored(), self._split.calls() if self._split is not None else nullcontext():
            for layer in self.layers:
                value = layer(value)
        if isinstance(value, (tuple, list)):
            if len(value) == 1:
                names = ", ".join(name for name, _ in self.layers.named_children())
                raise GradweaveError(
                    f"layers {names} return a tuple of one tensor, which the next layer would get as a tensor; return "
                    "the tensor"
                )
            return tuple(map(self._handed_on, value))
        return self._handed_on(value)

    def _handed_on(self, value: Any) -> Any:
        """Return an output in one piece of memory, as messages need it."""
        if not isinstance(value, torch.Tensor):
            return value
        value = value.contiguous()
        # torch's split of backward detaches a stage's outputs in place, which autograd forbids for views.
        return value.clone() if self._split is None and is_view(value) else value


class _Received(torch.autograd.Function):
    """A tensor that another stage has sent.

    It arrives as a leaf that needs a gradient, to which autograd lets no layer write in place; the result is no leaf.
    The gradient is sent back in one piece.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return grad.contiguous()


class Stage(PipelineStage):
    """torch's stage, whose W runs what X has left with its :class:`StageSplit`.

    Args:
        layers: By name.
        index: Of the stage.
        count: Of stages.
        device: Where it runs.
        group: Of the pipeline's ranks.
        ledger: Of the rank's weight gradients; None leaves the split of X and W to torch.
        autocast: Of forwards.
    """

    def __init__(
        self,
        layers: Iterable[tuple[str, nn.Module]],
        index: int,
        count: int,
        device: torch.device,
        group: Any,
        ledger: WeightGradientLedger | None,
        autocast: ForwardAutocast,
    ) -> None:
        self._split = None if ledger is None else StageSplit(ledger)
        build = None if self._split is None else self._split.build
        self._shapes: list[tuple[tuple[int, ...], torch.dtype]] | None = None
        self._needed: list[bool] | None = None
        own = StageLayers(layers, self._split, autocast)
        super().__init__(own, index, count, device, group=group, dw_builder=build)

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Run a forward as torch does; raise GradweaveError unless the next stage expects the output that it gives."""
        made = super().forward_one_chunk(*args, **kwargs)
        if self.is_last:
            return made
        parts = made if isinstance(made, (tuple, list)) else (made,)
        shapes = _shapes_of(made)
        self._shapes = self._shapes or shapes
        where = f"the output of stage {self.stage_index} (layers {self._names()})"
        if shapes != self._shapes:
            raise GradweaveError(
                f"{where} was of shape {_shown(self._shapes)} for the first micro-batch, and is of shape "
                f"{_shown(shapes)} now: it must not change; pad it, use the same precision in all steps, and "
                "have hooks leave it as it is"
            )
        needed = [one.requires_grad for one in parts]
        self._needed = self._needed or needed
        if any(now and not before for now, before in zip(needed, self._needed, strict=True)):
            raise GradweaveError(
                f"{where} needs a gradient, and did not in the first step, so that the next stage sends none; thaw "
                "layers before the first step, or make another pipeline"
            )
        if self._split is None and not any(one.requires_grad for one in parts):
            raise GradweaveError(
                f'{where} needs no gradient, with which split="torch" would lose the weight gradients of later stages; '
                'use split="fast"'
            )
        return made

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Return a context for the run by which torch learns shapes: it runs a copy of the layers, without hooks."""
        real = self.submod
        with unseen(real, self.device) as stand_in:
            self.submod = stand_in
            seen = stand_in.register_forward_hook(self._note)
            try:
                yield
            finally:
                seen.remove()
                self.submod = real

    def _note(self, _: nn.Module, __: Any, made: Any) -> None:
        """Remember the shapes that the next stage is told to expect."""
        if self.is_last:
            return
        odd = [
            one for one in (made if isinstance(made, (tuple, list)) else (made,)) if not isinstance(one, torch.Tensor)
        ]
        if odd:
            raise GradweaveError(
                f"stage {self.stage_index} (layers {self._names()}) hands on {type(odd[0]).__name__!r}, and only "
                "tensors can be sent: return a tensor or a tuple of them, or keep the layers that need it in one module"
            )
        self._shapes = _shapes_of(made)

    def _names(self) -> str:
        return ", ".join(name for name, _ in self.submod.layers.named_children())  # type: ignore[union-attr]

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Run a backward as torch does; raise GradweaveError for an input that the stage does not use.

        torch would send zeros for it: weights that only it depends on would be decayed, where without a pipeline they
        have no gradient and are left alone.
        """
        # A trial run may have left tasks.
        if self._split is not None:
            self._split.tasks.clear()
        given = () if self.is_first else self.fwd_cache[bwd_chunk_id][1]
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        for number, (one, grad) in enumerate(zip(given, self.bwd_cache[bwd_chunk_id], strict=False)):
            if one.requires_grad and grad is None:
                raise GradweaveError(
                    f"stage {self.stage_index} (layers {self._names()}) does not use tensor {number} of what it is "
                    "given, which needs a gradient; do not hand it on, or detach() it in the layer that does"
                )


def _shown(shapes: list[tuple[tuple[int, ...], torch.dtype]]) -> str:
    return ", ".join(f"{shape} of {dtype}" for shape, dtype in shapes)


def _shapes_of(made: Any) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [(tuple(one.shape), one.dtype) for one in (made if isinstance(made, (tuple, list)) else (made,))]


def total(made: Any) -> torch.Tensor:
    """Return a number that every tensor of an output has a part in, to take gradients of in place of a loss."""
    parts = [one for one in (made if isinstance(made, (tuple, list)) else (made,)) if isinstance(one, torch.Tensor)]
    sums = [one.sum() for one in parts if one.requires_grad] or [one.sum() for one in parts]
    return torch.stack([one.float() for one in sums]).sum()
