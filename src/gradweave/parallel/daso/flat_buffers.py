"""Flat buffers: many tensors packed into few vectors, and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from gradweave._compat.foreach import copy_all

Vectors = Sequence[torch.Tensor]
_MOST_FREE = 2
"""Free vectors of one size and dtype that a pool keeps."""


class Layout:
    """The places of tensors, of any shape, strides and floating dtype, in vectors of wide dtype.

    Tensors of double precision share one vector, all others one of float32; complex numbers are pairs. A tensor that is
    given twice has one place, and tensors that are added later are appended. An exchange sends each vector whole:
    there are no buckets and no order of readiness.
    """

    def __init__(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        self.tensors: list[torch.Tensor] = []
        self._members: dict[torch.dtype, list[torch.Tensor]] = {}
        self._known: set[int] = set()
        self.extend(tensors)

    def extend(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Append tensors that are new; return whether there were any."""
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
        """Number of elements of all vectors together."""
        return sum(as_real(tensor).numel() for tensor in self.tensors)

    @property
    def vector_count(self) -> int:
        """Number of vectors: one for each wide dtype in use."""
        return len(self._members)

    def replace(self, tensors: Iterable[torch.Tensor]) -> None:
        """Hold these tensors, in this order, instead of the present ones."""
        self.tensors.clear()
        self._members.clear()
        self._known.clear()
        self.extend(tensors)

    def first(self, count: int) -> Layout:
        """Return the layout of the first ``count`` tensors: its vectors are prefixes of the present ones."""
        return Layout(self.tensors[:count])

    def zeros(self) -> list[torch.Tensor]:
        """Return vectors of this layout, filled with zeros."""
        return [torch.zeros(size, dtype=dtype, device=device) for size, (dtype, device) in self._sizes()]

    def _sizes(self) -> list[tuple[int, tuple[torch.dtype, torch.device]]]:
        return [
            (sum(as_real(t).numel() for t in members), (dtype, members[0].device))
            for dtype, members in self._members.items()
        ]

    def pack(
        self, sources: Sequence[torch.Tensor | None] | None = None, *, pool: Pool | None = None
    ) -> list[torch.Tensor]:
        """Return vectors with copies of the tensors.

        Args:
            sources: Tensors of the same shapes to copy instead; None among them stands for zeros.
            pool: Memory for the vectors; None for new memory.
        """
        vectors = self.zeros() if pool is None else [pool.take(size, *kind) for size, kind in self._sizes()]
        if pool is not None and sources is not None and any(source is None for source in sources):
            for vector in vectors:
                vector.zero_()
        pairs = [
            (view, as_real(source.detach()))
            for view, source in zip(self.views(vectors), self.tensors if sources is None else sources, strict=True)
            if source is not None
        ]
        copy_all([view for view, _ in pairs], [source for _, source in pairs])
        return vectors

    def views(self, vectors: Vectors) -> list[torch.Tensor]:
        """Return each tensor's part of vectors of this layout, in its shape."""
        places: dict[int, torch.Tensor] = {}
        for members, vector in zip(self._members.values(), vectors, strict=True):
            shapes = [as_real(tensor).shape for tensor in members]
            for tensor, part, shape in zip(members, vector.split([s.numel() for s in shapes]), shapes, strict=True):
                places[id(tensor)] = part.view(shape)
        return [places[id(tensor)] for tensor in self.tensors]

    @torch.no_grad()
    def store(self, vectors: Vectors) -> None:
        """Write vectors into the tensors, in place."""
        for tensor, view in zip(self.tensors, self.views(vectors), strict=True):
            as_real(tensor).copy_(view)

    @torch.no_grad()
    def add(self, vectors: Vectors) -> None:
        """Add vectors to the tensors, in place; 16-bit tensors are rounded once."""
        # Distinct tensors may share memory, which must move once.
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


class Pool:
    """Vectors that are used again and again: new memory costs more than everything that is computed in it."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype, torch.device], list[torch.Tensor]] = {}

    def take(self, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a vector of any content."""
        free = self._free.get((size, dtype, device))
        return free.pop() if free else torch.empty(size, dtype=dtype, device=device)

    def copy(self, vectors: Vectors, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        """Return copies of vectors in a dtype; None for that of each vector."""
        made = []
        for vector in vectors:
            kind = vector.dtype if dtype is None else dtype
            made.append(self.take(len(vector), kind, vector.device).copy_(vector))
        return made

    def give(self, vectors: Vectors) -> None:
        """Take back vectors that are no longer used."""
        for vector in vectors:
            free = self._free.setdefault((len(vector), vector.dtype, vector.device), [])
            if len(free) < _MOST_FREE:
                free.append(vector)


def _wide(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype of the vector that a tensor is packed into."""
    return torch.float64 if tensor.dtype in (torch.float64, torch.complex128) else torch.float32


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself, or a view of a complex one as pairs."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
