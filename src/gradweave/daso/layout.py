"""Many tensors as one vector, and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from gradweave.compat import copy_all

Vectors = Sequence[torch.Tensor]


class Layout:
    """How tensors of any shapes, strides and floating dtypes lie in vectors of wide dtype.

    Those of double precision have a vector of their own, all others one of float32; complex numbers
    are pairs. A tensor that is given twice has one place. Tensors added later lie behind the others.
    """

    def __init__(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        self.tensors: list[torch.Tensor] = []
        self._members: dict[torch.dtype, list[torch.Tensor]] = {}
        self._known: set[int] = set()
        self.extend(tensors)

    def extend(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Adds those that are new; says whether there were any."""
        before = len(self.tensors)
        for tensor in tensors:
            if id(tensor) in self._known or not (tensor.is_floating_point() or tensor.is_complex()):
                continue
            self._known.add(id(tensor))
            self.tensors.append(tensor)
            self._members.setdefault(_wide(tensor), []).append(tensor)
        return len(self.tensors) > before

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._known

    @property
    def numel(self) -> int:
        """Elements of all vectors together."""
        return sum(as_real(tensor).numel() for tensor in self.tensors)

    def become(self, tensors: Iterable[torch.Tensor]) -> None:
        """Has these tensors, in this order, instead."""
        self.tensors.clear()
        self._members.clear()
        self._known.clear()
        self.extend(tensors)

    def first(self, count: int) -> Layout:
        """The layout as it was when it had so many tensors: the beginnings of the same vectors."""
        return Layout(self.tensors[:count])

    def zeros(self) -> list[torch.Tensor]:
        """Vectors of this layout."""
        return [
            torch.zeros(sum(as_real(t).numel() for t in members), dtype=dtype, device=members[0].device)
            for dtype, members in self._members.items()
        ]

    def pack(self, sources: Sequence[torch.Tensor | None] | None = None) -> list[torch.Tensor]:
        """Copies the tensors, or others of the same shapes, into new vectors; None is zeros."""
        vectors = self.zeros()
        pairs = [
            (view, as_real(source.detach()))
            for view, source in zip(self.views(vectors), self.tensors if sources is None else sources, strict=True)
            if source is not None
        ]
        copy_all([view for view, _ in pairs], [source for _, source in pairs])
        return vectors

    def views(self, vectors: Vectors) -> list[torch.Tensor]:
        """The part of each tensor in vectors of this layout, in its shape."""
        places: dict[int, torch.Tensor] = {}
        for members, vector in zip(self._members.values(), vectors, strict=True):
            shapes = [as_real(tensor).shape for tensor in members]
            for tensor, part, shape in zip(members, vector.split([s.numel() for s in shapes]), shapes, strict=True):
                places[id(tensor)] = part.view(shape)
        return [places[id(tensor)] for tensor in self.tensors]

    @torch.no_grad()
    def store(self, vectors: Vectors) -> None:
        """Writes vectors into the tensors, in place."""
        for tensor, view in zip(self.tensors, self.views(vectors), strict=True):
            as_real(tensor).copy_(view)

    @torch.no_grad()
    def add(self, vectors: Vectors) -> None:
        """Adds vectors to the tensors, in place; those of 16 bits are rounded once, and shared memory moved once."""
        moved: set[tuple[int, torch.Size, tuple[int, ...]]] = set()
        for tensor, view in zip(self.tensors, self.views(vectors), strict=True):
            real = as_real(tensor)
            memory = (real.data_ptr(), real.shape, real.stride())
            if memory in moved or not real.numel():
                continue
            moved.add(memory)
            if real.dtype == view.dtype:
                real.add_(view)
            else:
                real.copy_(real.to(view.dtype) + view)


def narrow(vectors: Vectors, dtype: torch.dtype | None) -> list[torch.Tensor]:
    """Copies in a dtype to send; None for that of each vector."""
    return [vector.to(vector.dtype if dtype is None else dtype, copy=True) for vector in vectors]


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype in (torch.float64, torch.complex128) else torch.float32


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a view of a complex one as pairs."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
