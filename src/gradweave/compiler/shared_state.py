"""Keeping an optimizer's step counts where one operation can advance them all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gradweave.compiler.optimizer_inputs import OptimizerInputs
from gradweave.step_graph.recording import Mark


class PackedCounts:
    """The 0-dimensional state of some parameters, in one vector per class of equal values.

    Each parameter's own tensor becomes an element of such a vector, on the parameter's device; it
    stays an ordinary entry of the optimizer's state.

    Attributes:
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
        for (_, _, dtype, device, value), members in self._alike(params).items():
            vector = torch.full((len(members),), value, dtype=dtype, device=device)
            self._class_of.update({(id(p), key): len(self.vectors) for p, key in members})
            self.vectors.append(vector)
            self._members.append(members)
            self._elements.append(list(vector))
            self._devices.append([optimizer.state[p][key].device for p, key in members])
        self._link()

    def _alike(self, params: Sequence[nn.Parameter]) -> dict[tuple[Any, ...], list[tuple[nn.Parameter, str]]]:
        """Parameters and keys by what must be the same for a class."""
        wanted = {id(p) for p in params}
        alike: dict[tuple[Any, ...], list[tuple[nn.Parameter, str]]] = defaultdict(list)
        for index, group in enumerate(self._optimizer.param_groups):
            for p in group["params"]:
                for key, value in self._optimizer.state.get(p, {}).items():
                    if id(p) in wanted and isinstance(value, torch.Tensor) and value.dim() == 0:
                        alike[key, index, value.dtype, p.device, float(value)].append((p, key))
        return alike

    def _link(self) -> None:
        state = self._optimizer.state
        for members, elements in zip(self._members, self._elements, strict=True):
            for (p, key), element in zip(members, elements, strict=True):
                state[p][key] = element
        self.note_written()

    def note_written(self) -> None:
        """To be called behind every change that is ours."""
        self._versions = [vector._version for vector in self.vectors]

    def restore(self) -> bool:
        """Makes it hold again what the optimizer's state does, if somebody else has changed that.

        Returns:
            Whether it could: not if counts that were equal no longer are.
        """
        if self._intact():
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
        self._link()
        return True

    def covers(self, params: Sequence[nn.Parameter]) -> bool:
        """Whether it holds all that it would hold of these parameters if it was made now."""
        if self.params != frozenset(map(id, params)):
            return False
        now = {(id(p), key) for members in self._alike(params).values() for p, key in members}
        return now == self._class_of.keys()

    def release(self) -> None:
        """Gives each parameter a tensor of its own again, where that was."""
        state = self._optimizer.state
        for members, elements, devices in zip(self._members, self._elements, self._devices, strict=True):
            for (p, key), element, device in zip(members, elements, devices, strict=True):
                if state[p].get(key) is element:
                    state[p][key] = element.detach().clone().to(device)

    def _intact(self) -> bool:
        if any(vector._version != version for vector, version in zip(self.vectors, self._versions, strict=True)):
            return False
        state = self._optimizer.state
        return all(
            state.get(p, {}).get(key) is element
            for members, elements in zip(self._members, self._elements, strict=True)
            for (p, key), element in zip(members, elements, strict=True)
        )

    def classes(self, optimizer: OptimizerInputs) -> tuple[tuple[int, ...], ...]:
        """The state slots of each class, in the order of the vectors."""
        slots: list[list[int]] = [[] for _ in self.vectors]
        for slot, place in enumerate(optimizer.state_slots):
            index = self._class_of.get((id(optimizer.params[place.param]), place.key))
            if index is not None:
                slots[index].append(slot)
        return tuple(map(tuple, slots))


class SharedState:
    """What all graphs of one step have in common besides the model and the optimizer.

    Attributes:
        sums: The gradients that micro-batches have summed up, by parameter.
        update: Whether the next step is to update, or only to sum up gradients.
        finish_eagerly: Whether the last step has only summed up gradients, and the update is still to
            be done, because parameters have gradients that its graph does not know.
        norm: Of all gradients in the last update, where it is computed.
        mark: If steps are to be recorded, what gives the context for each of their tasks.
        layers: The modules of the last recorded step, by number.
        begun: Whether a graph has begun to run in this call: what fails before has changed nothing.
        batch: The leaves of the batch of this call.
        fillings: By position in the batch, what integers may be padded with; None where that is not known. None until a
            graph was made.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._counts: PackedCounts | None = None
        self.sums: dict[nn.Parameter, torch.Tensor] = {}
        self.update = True
        self.finish_eagerly = False
        self.norm: torch.Tensor | None = None
        self.mark: Mark | None = None
        self.layers: tuple[str, ...] = ()
        self.begun = False
        self.batch: Sequence[Any] = ()
        self.fillings: dict[int, int | None] | None = None

    def counts(self, params: Sequence[nn.Parameter]) -> PackedCounts:
        """The packed counts of these parameters."""
        counts = self._counts
        if counts is None or not counts.covers(params) or not counts.restore():
            counts = self._counts = PackedCounts(self._optimizer, params)
        return counts

    def release_counts(self) -> None:
        """Undoes what :meth:`counts` has done to the optimizer's state."""
        if self._counts is not None:
            self._counts.release()
            self._counts = None

    def has(self, counts: PackedCounts) -> bool:
        """Whether these counts are those that are shared."""
        return counts is self._counts

    def is_current(self, counts: PackedCounts) -> bool:
        """Whether these counts are the optimizer's; what others have changed is taken over."""
        return counts is self._counts and counts.restore()

    def sums_for(self, params: Sequence[nn.Parameter]) -> list[torch.Tensor]:
        """Where the gradients of these parameters are summed up; they hold what ``.grad`` does."""
        for p in params:
            held = self.sums.get(p)
            if held is None or held.shape != p.shape or held.dtype is not p.dtype or held.device != p.device:
                held = self.sums[p] = torch.zeros_like(p)
            if p.grad is None:
                held.zero_()
            elif p.grad is not held:
                held.copy_(p.grad)
        return [self.sums[p] for p in params]

    def show_sums(self, params: Sequence[nn.Parameter]) -> None:
        """Lets the user see the sums as ``.grad``."""
        for p in params:
            p.grad = self.sums[p]
