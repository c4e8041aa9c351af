"""Hooks of a model's modules that make weights visible to readers which would not notice a pending update."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from gradweave._compat.functions import flat_leaves, in_function_transform, is_being_traced
from gradweave._compat.modules import is_compiled
from gradweave._runtime.deferred.compiled_callees import weights_handed_out
from gradweave._runtime.deferred.unseen_readers import modules_outside_compiled, weights_read_by_class
from gradweave._runtime.module_hook import ModuleHook


class ReaderGuards:
    """Guards of a model's readers, until :meth:`remove`.

    Args:
        model: The model.
        resolve: Called with parameters that are about to be read past their class.
        flush: Called before a use of the whole model that would not be noticed.
        traced: Called when torch.jit traces the model, which reads weights from C++ from then on.
    """

    def __init__(
        self,
        model: nn.Module,
        resolve: Callable[[Sequence[nn.Parameter]], None],
        flush: Callable[[], None],
        traced: Callable[[], None],
    ) -> None:
        self._resolve = resolve
        self._flush = flush
        self._traced = traced
        self._hooks: list[Any] = []
        self._own = self._read_unseen(model)
        try:
            for module in modules_outside_compiled(model):
                if module is not model:
                    self._guard_owner(module)
            # One hook for the model: torch 2.11's Dynamo takes hooks that were put before others for each other.
            entered = ModuleHook(self._entered)
            self._hooks.append(model.register_forward_pre_hook(entered, prepend=True, with_kwargs=True))
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _guard_owner(self, module: nn.Module) -> None:
        params = self._read_unseen(module)
        if params:
            hook = ModuleHook(partial(self._about_to_read, params))
            self._hooks.append(module.register_forward_pre_hook(hook, prepend=True))

    def _read_unseen(self, module: nn.Module) -> list[nn.Parameter]:
        """Return the parameters that a module may read without consulting their class: resolved before it runs.

        Compiled modules read all their parameters at once. A module that is not torch's may pass its own parameters, or
        those of torch's modules inside it, to a compiled extension. Some of torch's modules compute differently for
        parameters of an unknown class.
        """
        whole = is_compiled(module)
        if whole or not type(module).__module__.startswith("torch.nn"):
            params = list(module.parameters(recurse=whole))
            return params if whole else params + weights_handed_out(module)
        return weights_read_by_class(module)

    def _about_to_read(self, params: list[nn.Parameter], *_: Any) -> None:
        if not torch.compiler.is_compiling():  # nothing is pending while Dynamo compiles, and hooks need no code there
            self._resolve(params)

    def _entered(self, _: nn.Module, args: Any, keywords: Any) -> None:
        """Apply what is pending before the model runs, where its uses of parameters would not be noticed.

        Function transforms unwrap parameters, and inputs of another tensor class may override a function, before a
        parameter's class is consulted.
        """
        if torch.compiler.is_compiling():
            return
        if is_being_traced():
            self._traced()
        elif in_function_transform() or _has_subclass(args) or _has_subclass(keywords.values()):
            self._flush()
        elif self._own:
            self._resolve(self._own)


def _has_subclass(values: Iterable[Any]) -> bool:
    """Return whether a tensor subclass is among values, or in containers among them."""
    others = [value for value in values if type(value) is not torch.Tensor]
    return bool(others) and any(map(_is_subclass, flat_leaves(others)))


def _is_subclass(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and type(value) not in (torch.Tensor, nn.Parameter)
