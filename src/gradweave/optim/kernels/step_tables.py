"""Tables by which kernels find many tensors: what is where in a step, made once for a set of shapes.

A *layer* is a weight with its vectors; its *matrices* are its groups, as they are stored; a *tile* is
what one program reads of a matrix; a *block* is a stretch of one of its two products with vectors. What has
no vectors is cut into *chunks*. Rows of the tables, all of int64:

- layer (8): elements of its input vectors and of its output vectors, length of its record, nothing, first matrix,
  number of matrices.
- matrix (24): layer, group, rows, columns, taps that come before channels in a row (1 for none), length of
  the input and of the output vector, and as places in the buffer of vectors: the new input vector, the new
  output vector, the one on the rows (-1 for none), the one on the columns (likewise), both products, parts of
  both products (behind the product along rows and its parts come the squares of rows and theirs, and the largest
  gradients of rows and theirs); rows of a tile, number of parts of both products, first block and number of blocks,
  first tile and number of tiles, whether there is a bias, whether it is stored transposed.
- tile (4): matrix, first row, row behind the last, first column.
- block (4): matrix, whether of the product along columns, first element.
- chunk (4): tensor, first element, element behind the last.

Addresses are in tables of their own, since gradients move from step to step: per layer those of the weight,
its momentum, the bias, its momentum, the record, the input vectors, the output vectors and the size (8), and of
both gradients (2); per tensor without vectors those of the parameter, its state and its number of steps (4), and
of the gradient (1).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

_ENOUGH_TILES = 1200
"""Below some such number multiprocessors wait for the last ones; tall tiles have fewer parts to add up."""


@dataclass(frozen=True)
class Blocks:
    """How much one program does; all are powers of two.

    Attributes:
        rows: Rows of a wide matrix that are read at once.
        columns: Columns of a tile of it.
        narrow_rows: The same of a matrix that has no more columns than a narrow tile.
        narrow_columns: Columns of a narrow tile.
        most: How many times as many rows a tile has at most.
        vector: Elements of a product, or of a row of sums, at once.
        long: Elements of a vector that one program goes through.
        parts: Parts of a product that are added at once.
        flat: Elements of what has no vectors.
    """

    rows: int = 16
    columns: int = 256
    narrow_rows: int = 64
    narrow_columns: int = 64
    most: int = 16
    vector: int = 256
    long: int = 8192
    parts: int = 16
    flat: int = 2048


@dataclass(frozen=True)
class LayerShape:
    """What a layer's tables depend on.

    Attributes:
        member: Number of its parameter group.
        groups: Number of matrices.
        rows: Of a matrix as it is stored.
        columns: The same.
        taps: Of a kernel, if they come before channels in a row.
        with_outputs: Whether it has output vectors.
        with_bias: Whether it has a bias.
        transposed: Whether the input vector belongs to the rows as they are stored.
        aligned: Whether its memory begins where several elements can be read at once.
    """

    member: int
    groups: int
    rows: int
    columns: int
    taps: int
    with_outputs: bool
    with_bias: bool
    transposed: bool
    aligned: bool


@dataclass(frozen=True)
class FlatShape:
    """What the chunks of a parameter without vectors depend on: its group, its elements, its memory's beginning."""

    member: int
    elements: int
    aligned: bool


@dataclass(frozen=True)
class Segment:
    """Tiles or chunks that one launch takes: one behind the other, of one parameter group, all alike."""

    member: int
    aligned: bool
    first: int
    count: int
    rows: int = 0
    columns: int = 0


@dataclass(frozen=True)
class Tables:
    """The tables on the device, and the sizes of what a step writes to."""

    layers: torch.Tensor
    matrices: torch.Tensor
    tiles: torch.Tensor
    blocks: torch.Tensor
    chunks: torch.Tensor
    matrices_of: dict[int, tuple[int, int]]
    blocks_of: dict[int, tuple[int, int]]
    tile_segments: tuple[Segment, ...]
    chunk_segments: tuple[Segment, ...]
    elements: int
    with_left: bool
    count_of: dict[str, int]


@dataclass
class _Draft:
    with_left: bool
    most: int
    layers: list[list[int]] = field(default_factory=list)
    matrices: list[list[int]] = field(default_factory=list)
    tiles: list[list[int]] = field(default_factory=list)
    blocks: list[list[int]] = field(default_factory=list)
    chunks: list[list[int]] = field(default_factory=list)
    segments: dict[tuple[int, bool, int, int], list[int]] = field(default_factory=dict)
    elements: int = 0

    def place(self, size: int) -> int:
        """Room in the buffer of vectors."""
        start, self.elements = self.elements, self.elements + size
        return start


def make_tables(shapes: list[LayerShape], flats: list[FlatShape], sizes: Blocks, device: torch.device) -> Tables:
    """Makes the tables of a set of shapes; copies them to the device, which may wait for it."""
    elements = sum(shape.groups * shape.rows * shape.columns for shape in shapes)
    most = min(sizes.most, max(elements // (sizes.rows * sizes.columns * _ENOUGH_TILES), 2))
    draft = _Draft(with_left=any(shape.with_outputs or shape.transposed for shape in shapes), most=most)
    matrices_of: dict[int, tuple[int, int]] = {}
    blocks_of: dict[int, tuple[int, int]] = {}
    for number, shape in enumerate(shapes):
        first, first_block = len(draft.matrices), len(draft.blocks)
        inputs, outputs = (shape.rows, shape.columns) if shape.transposed else (shape.columns, shape.rows)
        outputs = outputs if shape.with_outputs else 0
        for group in range(shape.groups):
            _add_matrix(draft, number, group, shape, inputs, outputs, sizes)
        record = shape.groups * inputs + 1
        row = [shape.groups * inputs, shape.groups * outputs, record, 0, first, shape.groups, 0, 0]
        draft.layers.append(row)
        begin, count = matrices_of.get(shape.member, (first, 0))
        matrices_of[shape.member] = (begin, count + shape.groups)
        begin, count = blocks_of.get(shape.member, (first_block, 0))
        blocks_of[shape.member] = (begin, count + len(draft.blocks) - first_block)
    tile_segments = _order_tiles(draft)
    chunk_segments = _add_chunks(draft, flats, sizes)

    def table(rows: list[list[int]]) -> torch.Tensor:
        return torch.tensor(rows or [[0]], dtype=torch.int64).to(device)

    names = ("layers", "matrices", "tiles", "blocks", "chunks")
    return Tables(
        layers=table(draft.layers),
        matrices=table(draft.matrices),
        tiles=table(draft.tiles),
        blocks=table(draft.blocks),
        chunks=table(draft.chunks),
        matrices_of=matrices_of,
        blocks_of=blocks_of,
        tile_segments=tile_segments,
        chunk_segments=chunk_segments,
        elements=draft.elements,
        with_left=draft.with_left,
        count_of={name: len(getattr(draft, name)) for name in names},
    )


def _add_matrix(
    draft: _Draft, layer: int, group: int, shape: LayerShape, inputs: int, outputs: int, sizes: Blocks
) -> None:
    number, rows, columns = len(draft.matrices), shape.rows, shape.columns
    narrow = columns <= sizes.narrow_columns
    at_once, width = (sizes.narrow_rows, sizes.narrow_columns) if narrow else (sizes.rows, sizes.columns)
    tall = at_once * min(max(rows // (at_once * 8), 1), draft.most)
    parts_of_rows, parts_of_columns = -(-columns // width), -(-rows // tall)
    new_inputs = draft.place(inputs)
    new_outputs = draft.place(outputs) if outputs else -1
    on_rows, on_columns = (new_inputs, new_outputs) if shape.transposed else (new_outputs, new_inputs)
    places = [new_inputs, max(new_outputs, 0), on_rows, on_columns, draft.place(3 * rows), draft.place(columns)]
    places += [draft.place(3 * parts_of_rows * rows), draft.place(parts_of_columns * columns * draft.with_left)]
    first_block = len(draft.blocks)
    draft.blocks += [[number, 0, start, 0] for start in range(0, rows, sizes.vector)]
    if on_rows >= 0:
        draft.blocks += [[number, 1, start, 0] for start in range(0, columns, sizes.vector)]
    tiles = [
        [number, top, min(top + tall, rows), left] for top in range(0, rows, tall) for left in range(0, columns, width)
    ]
    aligned = shape.aligned and columns % 4 == 0
    segment = draft.segments.setdefault((shape.member, aligned, at_once, width), [])
    segment.append(number)
    row = [layer, group, rows, columns, shape.taps, inputs, outputs, *places, tall, parts_of_rows, parts_of_columns]
    row += [first_block, len(draft.blocks) - first_block, len(draft.tiles), len(tiles)]
    row += [int(shape.with_bias), int(shape.transposed)]
    draft.matrices.append(row)
    draft.tiles += tiles


def _order_tiles(draft: _Draft) -> tuple[Segment, ...]:
    """Puts the tiles of each launch behind each other."""
    before, draft.tiles = draft.tiles, []
    segments = []
    for (member, aligned, rows, columns), members in sorted(draft.segments.items()):
        first = len(draft.tiles)
        for number in members:
            matrix = draft.matrices[number]
            start, count = matrix[20:22]
            matrix[20] = len(draft.tiles)
            draft.tiles += before[start : start + count]
        segments.append(Segment(member, aligned, first, len(draft.tiles) - first, rows, columns))
    return tuple(segments)


def _add_chunks(draft: _Draft, flats: list[FlatShape], sizes: Blocks) -> tuple[Segment, ...]:
    alike: dict[tuple[int, bool], list[list[int]]] = {}
    for number, flat in enumerate(flats):
        chunks = alike.setdefault((flat.member, flat.aligned and flat.elements % 4 == 0), [])
        starts = range(0, flat.elements, sizes.flat)
        chunks += [[number, start, min(start + sizes.flat, flat.elements), 0] for start in starts]
    segments = []
    for (member, aligned), chunks in sorted(alike.items()):
        segments.append(Segment(member, aligned, len(draft.chunks), len(chunks)))
        draft.chunks += chunks
    return tuple(segments)
