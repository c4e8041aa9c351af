"""The layers of a model in the order of its forward, and the messages that their gradients travel in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from gradweave._compat.eager import ConvolutionModule, is_parametrized, no_torch_function
from gradweave._runtime.module_hook import ModuleHook


@dataclass(frozen=True, eq=False)
class Layer:
    """A module with parameters of its own.

    Attributes:
        name: In the model.
        module: The module.
        params: Those that are trained; one that an earlier layer has too is that one's.
        can_wait: Whether its weight gradient can be computed apart from its input gradient.
    """

    name: str
    module: nn.Module
    params: tuple[nn.Parameter, ...]
    can_wait: bool

    @property
    def size(self) -> int:
        """Bytes of its gradients."""
        return sum(p.numel() * p.element_size() for p in self.params)


class UseOrder:
    """Notes in which order the modules of a model run."""

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
        """All layers, by number, in the order in which they ran.

        One that did not run comes behind the one that the model has before it: so do weights of a module that are used
        without it, as by an attention whose output projection is its child.
        """
        ordered = list(self._used)
        for number in range(len(self._owners)):
            if number not in self._used:
                ordered.insert(ordered.index(number - 1) + 1 if number else 0, number)
        return ordered

    def close(self) -> None:
        """Notes no more."""
        for hook in self._hooks:
            hook.remove()

    def layers(self, numbers: Sequence[int]) -> list[Layer]:
        """The layers in a given order; those that train nothing are left out."""
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


def messages(layers: Sequence[Layer], k: int, bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Parameters by message, in the order of sending: layers from the last to the k-th, then those before it.

    A message is full once it holds ``bucket_bytes``; parameters of different types do not share one.
    """
    ordered = [p for layer in reversed(layers[k:]) for p in reversed(layer.params)]
    ordered += [p for layer in layers[:k] for p in layer.params]
    made: list[list[nn.Parameter]] = []
    size = 0
    for index, p in enumerate(ordered):
        fits = made and 0 < size < bucket_bytes and (made[-1][-1].dtype, made[-1][-1].device) == (p.dtype, p.device)
        if not fits or index == sum(len(layer.params) for layer in layers[k:]):
            made.append([])
            size = 0
        made[-1].append(p)
        size += p.numel() * p.element_size()
    return made
