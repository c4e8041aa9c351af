"""What the output projection of ``nn.MultiheadAttention`` is applied to.

Its ``out_proj`` is a linear layer that is never called: the module hands its weight to
``torch.nn.functional.multi_head_attention_forward``, which makes its input and calls ``linear`` itself. So, while an
attention module runs, a function mode waits for that call and runs a copy of the function whose ``linear`` is ours. The
projection's input and output then go to the layer's tap, as those of any other layer. The copy is torch's own code:
results and gradients are the same, bit for bit.

Nothing is entered where nothing would be caught: without gradients, torch's fast path is taken as always. Where
another function mode looks on, the attention is left to it as a whole: it could have a function of its own in mind.
Only modes that are known to care for what it is made of, if at all, have it taken apart. Dynamo traces all of it; of
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

from gradweave._compat.eager import (
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
from gradweave.optim.statistics.hooks import Tap

_ATTENTION = functional.multi_head_attention_forward
_PLAIN = (torch.Tensor, nn.Parameter)


class _Projection:
    """Stands for an output projection's weight in one call of an attention's function, which only hands it on.

    Args:
        module: The attention module.
        tap: Of its output projection.
        query: The call's, whose first dimensions are positions and, in a batch, samples.
    """

    def __init__(self, module: nn.MultiheadAttention, tap: Tap, query: torch.Tensor) -> None:
        self._module, self._tap, self._query = module, tap, query

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The projection of rows that are positions of samples, whose backward counts."""
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
        """Rows in the order in which the module, and any mask, has them."""
        x = x.view(*self._query.shape[:2], x.shape[-1])
        return x.transpose(0, 1) if self._module.batch_first else x


def _linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
    """In the place of ``linear`` in a copy of the function."""
    return weight(x, bias) if isinstance(weight, _Projection) else functional.linear(x, weight, bias)


class Inside(TorchFunctionMode):
    """Mode of an attention module's forward, whose function it takes apart.

    It holds nothing of a forward, and so serves all threads; compilers that stop in the midst of one can find it again.

    Args:
        module: The attention module, which is not kept alive.
        tap: Of its output projection.
        copy: Of the function, for compilers, which cannot make one; None if they are to see nothing of all this.

    Attributes:
        tap: The same.
    """

    def __init__(self, module: nn.MultiheadAttention, tap: Tap, copy: Callable[..., Any] | None) -> None:
        super().__init__()
        self.tap = tap
        self._module, self._copy = ref(module), copy

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """As torch calls it for every function of its own."""
        kwargs = kwargs or {}
        compiling = torch.compiler.is_compiling()
        module = self._module() if func is _ATTENTION and not (compiling and self._copy is None) else None
        if module is None or not _can_be_taken_apart(module, (*args, *kwargs.values())):
            return func(*args, **kwargs)
        weight = module.out_proj.weight
        projection = _Projection(module, self.tap, args[0] if args else kwargs["query"])
        args = tuple(projection if one is weight else one for one in args)
        kwargs = {name: projection if one is weight else one for name, one in kwargs.items()}
        if compiling and self._copy is not None:
            return self._copy(*args, **kwargs)
        return part_by_part(func, linear=_linear)(*args, **kwargs)

    def enter(self, module: Any, _: Any) -> None:
        """Before the module's forward."""
        if torch.compiler.is_compiling():
            if self._copy is None:
                return
        else:
            self.leave()  # what an interrupt, of which no hook hears, has left behind
            if is_being_traced() or in_function_transform():
                return
        if self.tap.record is not None and torch.is_grad_enabled() and module.out_proj.weight.requires_grad:
            enter_function_mode(self)

    def leave(self, *_: Any) -> None:
        """Behind it, or when it has failed."""
        if any(mode is self for mode in function_modes()):
            leave_function_mode(self)


def _can_be_taken_apart(module: nn.MultiheadAttention, given: tuple[Any, ...]) -> bool:
    """Whether a call is a module's, and nobody but us has a say in how it runs."""
    weight = module.out_proj.weight
    if not any(one is weight for one in given):
        return False
    if not all(_lets_parts_be_seen(mode) for mode in function_modes()):
        if not torch.compiler.is_compiling():
            announce(
                "optim: another torch-function mode looks at an attention; nothing is caught of its output "
                "projection, whose gradient is used as it is"
            )
        return False
    apply_pending_updates(*given)
    return all(type(one) in _PLAIN for one in given if isinstance(one, torch.Tensor))


def _lets_parts_be_seen(mode: TorchFunctionMode) -> bool:
    """Whether a mode may be shown what a function is made of, and not the function."""
    return isinstance(mode, WeightGradientSplitter) or is_device_mode(mode)


def takes_apart(module: nn.Module) -> TypeGuard[nn.MultiheadAttention]:
    """Whether a module is an attention whose forward is torch's own."""
    return isinstance(module, nn.MultiheadAttention) and type(module).forward is nn.MultiheadAttention.forward


def unseen_projections(model: nn.Module, *, seen: bool) -> set[int]:
    """Output projections of which nothing can be caught.

    Args:
        model: The model.
        seen: Whether those of torch's own attention can.
    """
    attentions = [module for module in model.modules() if isinstance(module, nn.MultiheadAttention)]
    return {id(module.out_proj) for module in attentions if not seen or not takes_apart(module)}


def watch_projections(model: nn.Module, layers: Iterable[tuple[nn.Module, Tap]]) -> Iterator[RemovableHandle]:
    """Puts hooks on the attention modules whose output projections have taps.

    Args:
        model: The model.
        layers: Its layers that have taps.
    """
    taps = {id(layer): tap for layer, tap in layers}
    found = [module for module in model.modules() if takes_apart(module) and id(module.out_proj) in taps]
    copy = part_by_part(_ATTENTION, traceable=True, linear=_linear) if traces_entered_modes() else None
    if found and copy is None:
        announce(
            f"optim: torch {torch.__version__} is not known to trace what catches an attention's output projection; "
            "in compiled models its gradient is used as it is"
        )
    for module in found:
        inside = Inside(module, taps[id(module.out_proj)], copy)
        yield module.register_forward_pre_hook(ModuleHook(inside.enter))
        yield module.register_forward_hook(ModuleHook(inside.leave), always_call=True, prepend=True)
