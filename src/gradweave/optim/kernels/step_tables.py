"""Tables by which the kernels of a step find many tensors; made once for a set of shapes.

Each ``NamedTuple`` here is the schema of a table, whose rows are its instances, as int64. Kernels take the numbers of
columns from the same classes (see :func:`gradweave.optim.kernels.launch_triton.columns_of`).

A *layer* is a weight with its vectors; its *matrices* are its groups, as they are stored. A *tile* is what one program
reads of a matrix. A *block* is a stretch of one of a matrix's two products with vectors. Parameters without vectors are
cut into *chunks*. Addresses are in tables of their own, since those of gradients change from step to step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

_TARGET_TILES = 1200
"""With much fewer tiles, multiprocessors wait for the last ones; with more, there are more parts to add up."""


class LayerRow(NamedTuple):
    """Row of the layer table."""

    inputs: int
    """Elements of all of its input vectors."""
    record_length: int
    first_matrix: int
    matrices: int


class MatrixRow(NamedTuple):
    """Row of the matrix table. Fields that end in ``_at`` are offsets into the scratch buffer of vectors."""

    layer: int
    group: int
    """Number of the matrix in its layer."""
    rows: int
    columns: int
    taps: int
    """Taps of a convolution's kernel that come before channels in memory; 1 if channels come first."""
    inputs: int
    """Length of the input vector."""
    outputs: int
    """Length of the output vector; 0 without one."""
    new_inputs_at: int
    new_outputs_at: int
    u_at: int
    """Vector on the rows; -1 without one."""
    v_at: int
    """Vector on the columns; -1 without one."""
    q_at: int
    """Product along the rows, followed by each row's square and by each row's largest gradient."""
    w_at: int
    """Product along the columns."""
    q_parts_at: int
    """Parts of what is at ``q_at``: all parts of the product, then those of the squares, then of the largest."""
    w_parts_at: int
    tile_rows: int
    q_parts: int
    """Number of parts of ``q``: one for each tile beside another."""
    w_parts: int
    """Number of parts of ``w``: one for each tile below another."""
    first_block: int
    blocks: int
    has_bias: int
    is_transposed: int
    """Whether the input vector belongs to the rows."""


class TileRow(NamedTuple):
    """Row of the tile table."""

    matrix: int
    first_row: int
    end_row: int
    first_column: int


class BlockRow(NamedTuple):
    """Row of the block table."""

    matrix: int
    is_of_columns: int
    """Whether it is a stretch of ``w`` and not of ``q``."""
    start: int


class ChunkRow(NamedTuple):
    """Row of the chunk table."""

    tensor: int
    start: int
    end: int


class LayerTensors(NamedTuple):
    """Tensors of a layer that stay where they are: a row of a table of addresses, 0 for what it does not have."""

    weight: torch.Tensor
    momentum: torch.Tensor
    bias: torch.Tensor | None
    bias_momentum: torch.Tensor | None
    record: torch.Tensor
    input_vector: torch.Tensor
    output_vector: torch.Tensor | None
    size: torch.Tensor


class GradientTensors(NamedTuple):
    """Gradients of a layer, which each step may allocate: a row of a table of addresses."""

    weight: torch.Tensor
    bias: torch.Tensor | None


class FirstOrderTensors(NamedTuple):
    """A parameter without vectors and its state: a row of a table of addresses, 0 for what its rule does not need."""

    parameter: torch.Tensor
    first_moment: torch.Tensor
    """AdamW's, or SGD's momentum."""
    second_moment: torch.Tensor | None
    step: torch.Tensor | None


class BlockSums(NamedTuple):
    """Sums of a block, in float32: scratch that one kernel writes and the next one reads."""

    q_square: float
    u_q: float
    """Product of ``u`` and ``q``."""
    u_bias: float
    """Product of ``u`` and the bias' look-ahead gradient."""
    row_squares: float
    w_square: float
    largest: float
    """Largest gradient."""


class MatrixNumbers(NamedTuple):
    """Numbers of a matrix, in float32: scratch that kernels write for those after them."""

    inputs_square: float
    """Square of the input vector, without the bias' one."""
    has_outputs: float
    """Whether an earlier step has found an output vector."""
    alpha: float
    beta: float
    alpha_uq: float
    """``alpha`` times the product of ``u`` and ``q``."""
    u_bias: float
    """Product of ``u`` and the bias' look-ahead gradient."""
    square: float
    """Square of the look-ahead gradient; 0 without a gradient in this step."""
    removed_square: float
    """Difference of that and the square of the direction."""
    rest_square: float
    """Square of ``w - alpha (u·q) v``, with the bias' element."""
    twice_alpha: float
    """Factor of the square of a row's element of ``q`` by which the row's square decreases."""


class LayerNumbers(NamedTuple):
    """Numbers of a layer, in float32: scratch that kernels write for those after them."""

    is_useful: float
    """Whether its record has places, and finite sums."""
    places: float
    """Number of places in its record; 1 if there are none."""
    has_inputs: float
    """Whether an earlier step has left input vectors."""
    scale: float
    """Factor of the direction, if all rows have the same."""
    row_size: float
    """Length of a row's step."""


@dataclass(frozen=True)
class BlockSizes:
    """How much one program does; all are powers of two.

    Attributes:
        rows: Rows of a wide matrix that are read at once.
        columns: Columns of a wide matrix's tile.
        narrow_rows: Rows that are read at once of a matrix with no more than ``narrow_columns`` columns.
        narrow_columns: Columns of a narrow matrix's tile.
        max_repeats: How many times as many rows a tile has as are read at once, at most.
        vector: Elements of a product, or of a table of sums, at once.
        long: Elements of a vector at once, where one program goes through all of it.
        parts: Parts of a product that are added up at once.
        flat: Elements of a chunk.
    """

    rows: int = 16
    columns: int = 256
    narrow_rows: int = 64
    narrow_columns: int = 64
    max_repeats: int = 16
    vector: int = 256
    long: int = 8192
    parts: int = 16
    flat: int = 2048


@dataclass(frozen=True)
class LayerShape:
    """Properties of a layer that its rows in the tables depend on.

    Attributes:
        group_index: Number of its parameter group.
        matrices: Number of its matrices.
        rows: Rows of a matrix as it is stored.
        columns: Columns of a matrix as it is stored.
        taps: Taps of a convolution's kernel, if they come before channels in memory; else 1.
        has_outputs: Whether it has output vectors.
        has_bias: Whether it has a bias.
        is_transposed: Whether the input vector belongs to the rows as they are stored.
        is_aligned: Whether its memory begins at multiples of 16 bytes.
    """

    group_index: int
    matrices: int
    rows: int
    columns: int
    taps: int
    has_outputs: bool
    has_bias: bool
    is_transposed: bool
    is_aligned: bool


@dataclass(frozen=True)
class FirstOrderShape:
    """Properties of a parameter without vectors that its chunks depend on.

    Attributes:
        group_index: Number of its parameter group.
        elements: How many it has.
        is_aligned: Whether its memory begins at a multiple of 16 bytes.
    """

    group_index: int
    elements: int
    is_aligned: bool


class Range(NamedTuple):
    """Consecutive rows of a table."""

    first: int
    length: int


@dataclass(frozen=True)
class TileLaunch:
    """Consecutive tiles that one launch takes: of one parameter group, of one size, and all aligned or none.

    Attributes:
        group_index: Number of the parameter group.
        is_aligned: Whether rows begin at multiples of 16 bytes.
        tiles: The tiles.
        rows: Rows that are read at once.
        columns: Columns of a tile.
    """

    group_index: int
    is_aligned: bool
    tiles: Range
    rows: int
    columns: int


@dataclass(frozen=True)
class ChunkLaunch:
    """Consecutive chunks that one launch takes: of one parameter group, and all aligned or none.

    Attributes:
        group_index: Number of the parameter group.
        is_aligned: Whether chunks begin, and tensors end, at multiples of 16 bytes.
        chunks: The chunks.
    """

    group_index: int
    is_aligned: bool
    chunks: Range


@dataclass(frozen=True)
class StepTables:
    """The tables on the device, what each launch takes of them, and sizes of scratch memory.

    Attributes:
        layers: Rows of :class:`LayerRow`.
        matrices: Rows of :class:`MatrixRow`.
        tiles: Rows of :class:`TileRow`.
        blocks: Rows of :class:`BlockRow`.
        chunks: Rows of :class:`ChunkRow`.
        counts: Number of rows of each table, by its name.
        matrices_of: The matrices of each parameter group, by its number.
        blocks_of: The blocks of each parameter group, by its number.
        tile_launches: Launches over tiles.
        chunk_launches: Launches over chunks.
        vector_elements: Size of the scratch buffer of vectors.
        has_left: Whether any matrix has a vector on its rows.
    """

    layers: torch.Tensor
    matrices: torch.Tensor
    tiles: torch.Tensor
    blocks: torch.Tensor
    chunks: torch.Tensor
    counts: dict[str, int]
    matrices_of: dict[int, Range]
    blocks_of: dict[int, Range]
    tile_launches: tuple[TileLaunch, ...]
    chunk_launches: tuple[ChunkLaunch, ...]
    vector_elements: int
    has_left: bool


def make_tables(
    shapes: Sequence[LayerShape], first_order: Sequence[FirstOrderShape], sizes: BlockSizes, device: torch.device
) -> StepTables:
    """Make the tables of a set of shapes, and copy them to the device, which may wait for it.

    Args:
        shapes: Of layers.
        first_order: Of parameters without vectors.
        sizes: How much one program does.
        device: Where the step runs.
    """
    draft = _Draft(sizes, shapes)
    for shape in shapes:
        draft.add_layer(shape)
    tiles, tile_launches = draft.tiles()
    chunks, chunk_launches = _chunks(first_order, sizes)
    rows: dict[str, Sequence[tuple[int, ...]]] = {
        "layers": draft.layers,
        "matrices": draft.matrices,
        "tiles": tiles,
        "blocks": draft.blocks,
        "chunks": chunks,
    }
    tables = {name: torch.tensor(table or [[0]], dtype=torch.int64).to(device) for name, table in rows.items()}
    return StepTables(
        **tables,
        counts={name: len(table) for name, table in rows.items()},
        matrices_of=draft.matrices_of,
        blocks_of=draft.blocks_of,
        tile_launches=tile_launches,
        chunk_launches=chunk_launches,
        vector_elements=draft.vector_elements,
        has_left=draft.has_left,
    )


class _Draft:
    """Tables of matrices that are being made."""

    def __init__(self, sizes: BlockSizes, shapes: Sequence[LayerShape]) -> None:
        self.layers: list[LayerRow] = []
        self.matrices: list[MatrixRow] = []
        self.blocks: list[BlockRow] = []
        self.matrices_of: dict[int, Range] = {}
        self.blocks_of: dict[int, Range] = {}
        self.vector_elements = 0
        self.has_left = any(shape.has_outputs or shape.is_transposed for shape in shapes)
        elements = sum(shape.matrices * shape.rows * shape.columns for shape in shapes)
        repeats = elements // (sizes.rows * sizes.columns * _TARGET_TILES)
        self._max_repeats = min(sizes.max_repeats, max(repeats, 2))
        self._sizes = sizes
        self._tiles: dict[tuple[int, bool, int, int], list[TileRow]] = {}

    def add_layer(self, shape: LayerShape) -> None:
        """Add a layer, its matrices, and their blocks and tiles; layers of one parameter group come in a row."""
        first_matrix, first_block = len(self.matrices), len(self.blocks)
        inputs, outputs = (shape.rows, shape.columns) if shape.is_transposed else (shape.columns, shape.rows)
        outputs = outputs if shape.has_outputs else 0
        for group in range(shape.matrices):
            self._add_matrix(group, shape, inputs, outputs)
        self.layers.append(
            LayerRow(
                inputs=shape.matrices * inputs,
                record_length=shape.matrices * inputs + 1,
                first_matrix=first_matrix,
                matrices=shape.matrices,
            )
        )
        _extend(self.matrices_of, shape.group_index, first_matrix, len(self.matrices))
        _extend(self.blocks_of, shape.group_index, first_block, len(self.blocks))

    def _add_matrix(self, group: int, shape: LayerShape, inputs: int, outputs: int) -> None:
        number, rows, columns, sizes = len(self.matrices), shape.rows, shape.columns, self._sizes
        is_narrow = columns <= sizes.narrow_columns
        rows_at_once, tile_columns = (
            (sizes.narrow_rows, sizes.narrow_columns) if is_narrow else (sizes.rows, sizes.columns)
        )
        # Eight tiles or more below each other, where there are rows enough: a program takes a tile's rows in turn.
        tile_rows = rows_at_once * min(max(rows // (rows_at_once * 8), 1), self._max_repeats)
        q_parts, w_parts = -(-columns // tile_columns), -(-rows // tile_rows)
        new_inputs_at = self._reserve(inputs)
        new_outputs_at = self._reserve(outputs) if outputs else -1
        u_at, v_at = (new_inputs_at, new_outputs_at) if shape.is_transposed else (new_outputs_at, new_inputs_at)
        tiles = [
            TileRow(number, top, min(top + tile_rows, rows), left)
            for top in range(0, rows, tile_rows)
            for left in range(0, columns, tile_columns)
        ]
        blocks = [BlockRow(number, 0, start) for start in range(0, rows, sizes.vector)]
        if u_at >= 0:
            blocks += [BlockRow(number, 1, start) for start in range(0, columns, sizes.vector)]
        self.matrices.append(
            MatrixRow(
                layer=len(self.layers),
                group=group,
                rows=rows,
                columns=columns,
                taps=shape.taps,
                inputs=inputs,
                outputs=outputs,
                new_inputs_at=new_inputs_at,
                new_outputs_at=max(new_outputs_at, 0),
                u_at=u_at,
                v_at=v_at,
                q_at=self._reserve(3 * rows),
                w_at=self._reserve(columns),
                q_parts_at=self._reserve(3 * q_parts * rows),
                w_parts_at=self._reserve(w_parts * columns * self.has_left),
                tile_rows=tile_rows,
                q_parts=q_parts,
                w_parts=w_parts,
                first_block=len(self.blocks),
                blocks=len(blocks),
                has_bias=int(shape.has_bias),
                is_transposed=int(shape.is_transposed),
            )
        )
        self.blocks += blocks
        # Rows of a multiple of four elements begin at multiples of 16 bytes, the widest access, if the first one does.
        is_aligned = shape.is_aligned and columns % 4 == 0
        self._tiles.setdefault((shape.group_index, is_aligned, rows_at_once, tile_columns), []).extend(tiles)

    def _reserve(self, size: int) -> int:
        """Return the offset of so many new elements in the scratch buffer of vectors."""
        start, self.vector_elements = self.vector_elements, self.vector_elements + size
        return start

    def tiles(self) -> tuple[list[TileRow], tuple[TileLaunch, ...]]:
        """Return all tiles, sorted by launches."""
        tiles: list[TileRow] = []
        launches = []
        for (group_index, is_aligned, rows, columns), members in sorted(self._tiles.items()):
            launches.append(TileLaunch(group_index, is_aligned, Range(len(tiles), len(members)), rows, columns))
            tiles += members
        return tiles, tuple(launches)


def _chunks(shapes: Sequence[FirstOrderShape], sizes: BlockSizes) -> tuple[list[ChunkRow], tuple[ChunkLaunch, ...]]:
    """Return the chunks of parameters without vectors, sorted by launches."""
    alike: dict[tuple[int, bool], list[ChunkRow]] = {}
    for number, shape in enumerate(shapes):
        members = alike.setdefault((shape.group_index, shape.is_aligned and shape.elements % 4 == 0), [])
        for start in range(0, shape.elements, sizes.flat):
            members.append(ChunkRow(number, start, min(start + sizes.flat, shape.elements)))
    chunks: list[ChunkRow] = []
    launches = []
    for (group_index, is_aligned), members in sorted(alike.items()):
        launches.append(ChunkLaunch(group_index, is_aligned, Range(len(chunks), len(members))))
        chunks += members
    return chunks, tuple(launches)


def _extend(ranges: dict[int, Range], group_index: int, first: int, end: int) -> None:
    """Add rows to those of a parameter group, which they follow."""
    begin, length = ranges.get(group_index, Range(first, 0))
    ranges[group_index] = Range(begin, length + end - first)
