"""An optimizer's step counts, kept where one operation can advance them all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gradweave._compat.tensors import version_of
from gradweave.compiler.optimizer_inputs import OptimizerInputs


class StepCounts:
    """The 0-dimensional state of some parameters, in one vector per class of equal values.

    Each parameter's own tensor becomes an element of such a vector, a view on the parameter's device; it stays an
    ordinary entry of the optimizer's state. A graph then advances a vector where eager code would advance hundreds of
    tensors, each in a launch of its own.

    Changes by others are detected by the vectors' versions, which autograd counts for in-place writes to any view, and
    by entries that are no longer the views.

    Args:
        optimizer: Its state is changed.
        params: The parameters.

    Attributes:
        params: Ids of the parameters.
        vectors: A vector per class, an element per parameter.
    """

    def __init__(self, optimizer: Optimizer, params: Sequence[nn.Parameter]) -> None:
        self._optimizer = optimizer
        self.params = frozenset(map(id, params))
        self.vectors: list[torch.Tensor] = []
        self._members: list[list[tuple[nn.Parameter, str]]] = []
        self._elements: list[list[torch.Tensor]] = []
        self._devices: list[list[torch.device]] = []
        self._class_of: dict[tuple[int, str], int] = {}
        for (_, _, dtype, device, value), members in self._classes(params).items():
            vector = torch.full((len(members),), value, dtype=dtype, device=device)
            self._class_of.update({(id(p), key): len(self.vectors) for p, key in members})
            self.vectors.append(vector)
            self._members.append(members)
            self._elements.append(list(vector))
            self._devices.append([optimizer.state[p][key].device for p, key in members])
        self._put_into_state()

    def _classes(self, params: Sequence[nn.Parameter]) -> dict[tuple[Any, ...], list[tuple[nn.Parameter, str]]]:
        """Group the entries by what they must share to advance together: key, group, dtype, device, value."""
        wanted = {id(p) for p in params}
        classes: dict[tuple[Any, ...], list[tuple[nn.Parameter, str]]] = defaultdict(list)
        for index, group in enumerate(self._optimizer.param_groups):
            for p in group["params"]:
                for key, value in self._optimizer.state.get(p, {}).items():
                    if id(p) in wanted and isinstance(value, torch.Tensor) and value.dim() == 0:
                        classes[key, index, value.dtype, p.device, float(value)].append((p, key))
        return classes

    def _put_into_state(self) -> None:
        state = self._optimizer.state
        for members, elements in zip(self._members, self._elements, strict=True):
            for (p, key), element in zip(members, elements, strict=True):
                state[p][key] = element
        self.note_written()

    def element_ids(self, vectors: Sequence[torch.Tensor]) -> Iterator[int]:
        """Yield the ids of the optimizer's tensors that are elements of some of the vectors."""
        for vector, elements in zip(self.vectors, self._elements, strict=True):
            if any(vector is one for one in vectors):
                yield from map(id, elements)

    def note_written(self) -> None:
        """Note that a change of the vectors was a graph's; to be called after each."""
        self._versions = list(map(version_of, self.vectors))

    def refresh(self) -> bool:
        """Take over the counts in the optimizer's state, if others have changed them.

        Returns:
            Whether that was possible: not if counts of one class differ now.
        """
        if self._is_unchanged():
            return True
        state = self._optimizer.state
        values = []
        for members, vector in zip(self._members, self.vectors, strict=True):
            now = [state.get(p, {}).get(key) for p, key in members]
            if not all(isinstance(x, torch.Tensor) and x.dim() == 0 and x.dtype is vector.dtype for x in now):
                return False
            numbers = {float(x) for x in now}
            if len(numbers) > 1:
                return False
            values.append(numbers.pop())
        for vector, value in zip(self.vectors, values, strict=True):
            vector.fill_(value)
        self._put_into_state()
        return True

    def _is_unchanged(self) -> bool:
        if any(version_of(x) != version for x, version in zip(self.vectors, self._versions, strict=True)):
            return False
        state = self._optimizer.state
        return all(
            state.get(p, {}).get(key) is element
            for members, elements in zip(self._members, self._elements, strict=True)
            for (p, key), element in zip(members, elements, strict=True)
        )

    def covers(self, params: Sequence[nn.Parameter]) -> bool:
        """Return whether these hold all entries that counts made now for the parameters would hold."""
        if self.params != frozenset(map(id, params)):
            return False
        now = {(id(p), key) for members in self._classes(params).values() for p, key in members}
        return now == self._class_of.keys()

    def release(self) -> None:
        """Give each parameter a tensor of its own again, on the device where it was."""
        state = self._optimizer.state
        for members, elements, devices in zip(self._members, self._elements, self._devices, strict=True):
            for (p, key), element, device in zip(members, elements, devices, strict=True):
                if state[p].get(key) is element:
                    state[p][key] = element.detach().clone().to(device)

    def slots(self, optimizer: OptimizerInputs) -> tuple[tuple[int, ...], ...]:
        """Return the state slots of each class, in the order of the vectors."""
        slots: list[list[int]] = [[] for _ in self.vectors]
        for slot, place in enumerate(optimizer.state_slots):
            index = self._class_of.get((id(optimizer.params[place.param]), place.key))
            if index is not None:
                slots[index].append(slot)
        return tuple(map(tuple, slots))
