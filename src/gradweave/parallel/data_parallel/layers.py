"""The layers of a model in the order of its forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from gradweave._compat.functions import no_torch_function
from gradweave._compat.modules import ConvolutionModule, is_parametrized
from gradweave._runtime.buckets import bytes_of
from gradweave._runtime.module_hook import ModuleHook


@dataclass(frozen=True, eq=False)
class Layer:
    """A module with parameters of its own.

    Attributes:
        name: The module's name in the model.
        module: The module.
        params: Its trained parameters, without those that an earlier layer has too.
        can_wait: Whether its weight gradient can be computed after its input gradient.
    """

    name: str
    module: nn.Module
    params: tuple[nn.Parameter, ...]
    can_wait: bool

    @property
    def size(self) -> int:
        """Bytes of the layer's gradients."""
        return sum(map(bytes_of, self.params))


class UseOrder:
    """The order in which the modules of a model run, observed by hooks during one forward or more."""

    def __init__(self, model: nn.Module) -> None:
        self._owners = [(n, m) for n, m in model.named_modules() if next(m.parameters(recurse=False), None) is not None]
        self._number = {id(module): number for number, (_, module) in enumerate(self._owners)}
        self._used: dict[int, None] = {}
        self._hooks: list[Any] = []
        try:
            for _, module in self._owners:
                self._hooks.append(module.register_forward_pre_hook(ModuleHook(self._note)))
        except BaseException:
            self.close()
            raise

    def _note(self, module: nn.Module, *_: Any) -> None:
        self._used[self._number[id(module)]] = None

    def numbers(self) -> list[int]:
        """Return the numbers of all layers in the order in which they ran.

        A layer that did not run follows the layer that the model has before it. So does a module whose weights another
        module uses without calling it, such as the output projection of an attention layer, which is its child.
        """
        ordered = list(self._used)
        for number in range(len(self._owners)):
            if number not in self._used:
                ordered.insert(ordered.index(number - 1) + 1 if number else 0, number)
        return ordered

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def layers(self, numbers: Sequence[int]) -> list[Layer]:
        """Return the layers in a given order, without those that train nothing."""
        seen: set[int] = set()
        layers = []
        for number in numbers:
            name, module = self._owners[number]
            with no_torch_function():
                own = [p for p in module.parameters(recurse=False) if p.requires_grad and id(p) not in seen]
            seen.update(map(id, own))
            if own:
                layers.append(Layer(name, module, tuple(own), _can_wait(module, own)))
        return layers


def _can_wait(module: nn.Module, own: Sequence[nn.Parameter]) -> bool:
    if not isinstance(module, (nn.Linear, ConvolutionModule)) or is_parametrized(module):
        return False
    return any(module.weight is p for p in own)
