"""Statistics of the projections of ``nn.MultiheadAttention``, neither of which can be seen by a hook of its own.

The input projection is a parameter of the attention module. It is three matrices, for queries, keys and values, whose
input vectors are the means of the module's arguments; their output vectors, where they are collected, are the gradients
of its bias.

The output projection ``out_proj`` is a linear layer that is never called: the module hands its weight to
``torch.nn.functional.multi_head_attention_forward``, which computes its input and calls ``linear`` itself. So, while an
attention module runs, a function mode waits for that call and runs a copy of the function whose ``linear`` is ours. The
projection's input and output then go to the layer's tap, as those of any other layer. The copy is torch's own code:
results and gradients are the same, bit for bit.

The mode is not entered where no statistics would be collected: without gradients, torch's fast path is taken as usual.
Under another function mode, the attention is left to that mode as a whole, which may replace the function by its own;
except under modes that are known to look at the function's parts, if at anything. Dynamo traces all of this; with
versions of torch of which that is not known, compilers see nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeGuard
from weakref import ref

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from gradweave._compat.functions import (
    enter_function_mode,
    function_modes,
    in_function_transform,
    is_being_traced,
    is_device_mode,
    leave_function_mode,
    part_by_part,
)
from gradweave._compat.tracing import traces_entered_modes
from gradweave._logging import announce
from gradweave._runtime.interception import WeightGradientSplitter, apply_pending_updates
from gradweave._runtime.module_hook import ModuleHook
from gradweave.optim.kernels.gpu_statistics import GpuStatistics
from gradweave.optim.statistics.geometry import LINEAR, Layout
from gradweave.optim.statistics.hooks import CurrentMask, StatisticsOptions, Tap

_ATTENTION = functional.multi_head_attention_forward
_PLAIN = (torch.Tensor, nn.Parameter)


def is_stock_attention(module: nn.Module) -> TypeGuard[nn.MultiheadAttention]:
    """Return whether a module is an attention whose forward is torch's own."""
    return isinstance(module, nn.MultiheadAttention) and type(module).forward is nn.MultiheadAttention.forward


def input_projection(module: nn.Module) -> tuple[nn.Parameter, nn.Parameter | None] | None:
    """Return the weight and the bias of an attention module's joint input projection, or None if it has none."""
    if not is_stock_attention(module):
        return None
    own = dict(module.named_parameters(recurse=False))
    weight = own.get("in_proj_weight")
    return None if weight is None else (weight, own.get("in_proj_bias"))


class InputProjectionTap(Tap):
    """The hook of an attention module that collects the statistics of its input projection."""

    by_kernels = False

    def __init__(
        self, weight: nn.Parameter, options: StatisticsOptions, masking: CurrentMask, gpu_statistics: GpuStatistics
    ) -> None:
        width = weight.shape[1]
        super().__init__(Layout(LINEAR, 3, width, width), weight, options, masking, gpu_statistics)
        self.with_outputs = False
        self._one_of_three = Layout(LINEAR, 1, width, width)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], y: Any) -> Any:
        """Run after the module's forward: its first result passes through."""
        passed = super().__call__(module, (self._inputs(args, kwargs),), {}, y[0])
        return None if passed is None else (passed, *y[1:])

    def weight_of(self, module: nn.Module) -> torch.Tensor:
        """Return the weight of the projection."""
        return module.in_proj_weight  # type: ignore[return-value]

    def input_sums(self, x: Any) -> tuple[torch.Tensor, float | torch.Tensor]:
        """Return the sums of queries, keys and values, scaled as if there were as many of each as queries."""
        samples, mask = self.options.input_samples, self.masking.mask
        sums, count = self._one_of_three.input_sums(x[0].detach(), samples, mask)
        parts = [sums]
        for other in x[1:]:
            if other is x[0]:
                parts.append(sums)
                continue
            more, places = self._one_of_three.input_sums(other.detach(), samples, mask)
            parts.append(more * _ratio(count, places))
        return torch.cat(parts), count

    def _inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        given = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
        return given["query"], given["key"], given["value"]


def _ratio(count: float | torch.Tensor, places: float | torch.Tensor) -> float | torch.Tensor:
    """Return a quotient of counts; 0 where the divisor is."""
    if isinstance(places, torch.Tensor):
        divisor = torch.where(places > 0, places, torch.ones_like(places))
        return torch.where(places > 0, count / divisor, torch.zeros_like(places))
    return count / places if places else 0.0


def uncovered_output_projections(model: nn.Module, *, with_attention: bool) -> set[int]:
    """Return the ids of output projections whose statistics cannot be collected.

    Args:
        model: The model.
        with_attention: Whether those of torch's own attention can.
    """
    attentions = [module for module in model.modules() if isinstance(module, nn.MultiheadAttention)]
    return {id(module.out_proj) for module in attentions if not with_attention or not is_stock_attention(module)}


def hook_output_projections(model: nn.Module, layers: Iterable[tuple[nn.Module, Tap]]) -> Iterator[RemovableHandle]:
    """Register hooks on the attention modules whose output projections have taps, and yield their handles.

    Args:
        model: The model.
        layers: Its layers that have taps.
    """
    taps = {id(layer): tap for layer, tap in layers}
    found = [module for module in model.modules() if is_stock_attention(module) and id(module.out_proj) in taps]
    copy = part_by_part(_ATTENTION, traceable=True, linear=_linear) if traces_entered_modes() else None
    if found and copy is None:
        announce(
            f"optim: torch {torch.__version__} is not known to trace what collects the inputs of an attention's output "
            "projection; in compiled models its gradient is used as it is"
        )
    for module in found:
        mode = OutputProjectionMode(module, taps[id(module.out_proj)], copy)
        yield module.register_forward_pre_hook(ModuleHook(mode.enter))
        # Always called, as a mode that stays entered after a forward has failed would see everything else; and first,
        # so that the other hooks of the module run outside of it.
        yield module.register_forward_hook(ModuleHook(mode.leave), always_call=True, prepend=True)


class OutputProjectionMode(TorchFunctionMode):
    """The mode of an attention module's forward that runs a copy of its function, with a ``linear`` of our own.

    It stores nothing of a forward, and so serves all threads; and a compiler that breaks its graph in the midst of one
    can enter it again.

    Args:
        module: The attention module, which is not kept alive.
        tap: The tap of its output projection.
        copy: The copy of the function for compilers, which cannot make one; None to show compilers nothing.

    Attributes:
        tap: The tap.
    """

    def __init__(self, module: nn.MultiheadAttention, tap: Tap, copy: Callable[..., Any] | None) -> None:
        super().__init__()
        self.tap = tap
        self._module, self._copy = ref(module), copy

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Intercept the attention's function; torch calls this for every function of its own."""
        kwargs = kwargs or {}
        compiling = torch.compiler.is_compiling()
        module = self._module() if func is _ATTENTION and not (compiling and self._copy is None) else None
        if module is None or not _may_run_copy(module, (*args, *kwargs.values())):
            return func(*args, **kwargs)
        weight = module.out_proj.weight
        projection = _ProjectionCall(module, self.tap, args[0] if args else kwargs["query"])
        args = tuple(projection if one is weight else one for one in args)
        kwargs = {name: projection if one is weight else one for name, one in kwargs.items()}
        if compiling and self._copy is not None:
            return self._copy(*args, **kwargs)
        return part_by_part(func, linear=_linear)(*args, **kwargs)

    def enter(self, module: Any, _: Any) -> None:
        """Enter the mode before the module's forward, if there are statistics to collect."""
        if torch.compiler.is_compiling():
            if self._copy is None:
                return
        else:
            self.leave()  # after an interrupt such as Ctrl-C, for which torch calls no forward hooks
            if is_being_traced() or in_function_transform():
                return
        if self.tap.record is not None and torch.is_grad_enabled() and module.out_proj.weight.requires_grad:
            enter_function_mode(self)

    def leave(self, *_: Any) -> None:
        """Leave the mode after the forward, or when it has failed."""
        if any(mode is self for mode in function_modes()):
            leave_function_mode(self)


class _ProjectionCall:
    """A stand-in for the output projection's weight in one call of an attention's function, which only passes it on.

    The function hands it to ``linear``, which is ours, and thereby tells that call apart from its other ones.

    Args:
        module: The attention module.
        tap: The tap of its output projection.
        query: The call's query, whose first dimensions are positions and, in a batch, samples.
    """

    def __init__(self, module: nn.MultiheadAttention, tap: Tap, query: torch.Tensor) -> None:
        self._module, self._tap, self._query = module, tap, query

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return the projection of rows that are positions of samples; its backward collects statistics."""
        layer = self._module.out_proj
        y = functional.linear(x, layer.weight, bias)
        if self._query.dim() == 2 or not self._tap.tells_rows_apart:
            passed = self._tap(layer, (x,), {}, y)
            return y if passed is None else passed
        passed = self._tap(layer, (self._by_samples(x),), {}, self._by_samples(y))
        if passed is None:
            return y
        ordered: torch.Tensor = passed.transpose(0, 1) if self._module.batch_first else passed
        return ordered.reshape(y.shape)

    def _by_samples(self, x: torch.Tensor) -> torch.Tensor:
        """Return rows in the order of the module's arguments, and of any mask."""
        x = x.view(*self._query.shape[:2], x.shape[-1])
        return x.transpose(0, 1) if self._module.batch_first else x


def _linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Stand in for ``linear`` in a copy of the attention's function."""
    return weight(x, bias) if isinstance(weight, _ProjectionCall) else functional.linear(x, weight, bias)


def _may_run_copy(module: nn.MultiheadAttention, given: tuple[Any, ...]) -> bool:
    """Return whether a call is the module's, and neither another mode nor a tensor subclass may replace its code."""
    weight = module.out_proj.weight
    if not any(one is weight for one in given):
        return False
    if not all(_accepts_parts(mode) for mode in function_modes()):
        if not torch.compiler.is_compiling():
            announce(
                "optim: another torch-function mode looks at an attention; no statistics of its output projection are "
                "collected, whose gradient is used as it is"
            )
        return False
    apply_pending_updates(*given)
    return all(type(one) in _PLAIN for one in given if isinstance(one, torch.Tensor))


def _accepts_parts(mode: TorchFunctionMode) -> bool:
    """Return whether a mode may see the functions that the attention's function calls, instead of that function."""
    return isinstance(mode, WeightGradientSplitter) or is_device_mode(mode)
