"""Keeping an optimizer's step counts where one operation can advance them all."""

from __future__ import annotations

from collections import defaultdict

import torch

from gradweave.whole_step.optimizer_inputs import OptimizerInputs


class PackedCounts:
    """The 0-dimensional state of an optimizer, in one vector per class of equal values.

    Each parameter's own tensor becomes an element of such a vector, on the parameter's device; it
    stays an ordinary entry of the optimizer's state.

    Attributes:
        classes: State slots of each class.
        vectors: A vector per class, an element per slot.
    """

    def __init__(self, optimizer: OptimizerInputs) -> None:
        self._optimizer = optimizer
        tensors = optimizer.state()
        groups = {index: group for group, members in enumerate(optimizer.members) for index in members}
        alike: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for slot, (place, tensor) in enumerate(zip(optimizer.state_slots, tensors, strict=True)):
            if tensor.dim() == 0:
                device = optimizer.params[place.param].device
                alike[place.key, groups[place.param], tensor.dtype, device, float(tensor)].append(slot)
        self.classes = tuple(tuple(slots) for slots in alike.values())
        self.vectors: list[torch.Tensor] = []
        self._elements: list[tuple[int, torch.Tensor]] = []
        for (_, _, dtype, device, value), slots in alike.items():
            vector = torch.full((len(slots),), value, dtype=dtype, device=device)  # type: ignore[arg-type, call-overload]
            for slot, element in zip(slots, vector, strict=True):
                place = optimizer.state_slots[slot]
                optimizer.optimizer.state[optimizer.params[place.param]][place.key] = element
                self._elements.append((slot, element))
            self.vectors.append(vector)
        self.note_written()

    def note_written(self) -> None:
        """To be called behind every change that is ours."""
        self._versions = [vector._version for vector in self.vectors]

    def intact(self) -> bool:
        """Whether nobody else has replaced or changed any of it."""
        if any(vector._version != version for vector, version in zip(self.vectors, self._versions, strict=True)):
            return False
        optimizer = self._optimizer
        state, params, slots = optimizer.optimizer.state, optimizer.params, optimizer.state_slots
        return all(state[params[slots[slot].param]][slots[slot].key] is element for slot, element in self._elements)
