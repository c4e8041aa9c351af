"""Tables of a step: tiles and chunks cover every element once, and scratch memory has one purpose."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from gradweave.optim.kernels.step_tables import (
    BlockRow,
    BlockSizes,
    ChunkRow,
    FirstOrderShape,
    LayerRow,
    LayerShape,
    MatrixRow,
    TileRow,
    make_tables,
)

SMALL = BlockSizes(
    rows=2, columns=8, narrow_rows=4, narrow_columns=4, max_repeats=2, vector=4, long=8, parts=2, flat=16
)
CPU = torch.device("cpu")


@st.composite
def layer_shapes(draw, group_index):
    is_transposed = draw(st.booleans())
    return LayerShape(
        group_index=group_index,
        matrices=draw(st.integers(1, 3)),
        rows=draw(st.integers(1, 40)),
        columns=draw(st.integers(1, 40)),
        taps=1,
        has_outputs=not is_transposed and draw(st.booleans()),
        has_bias=draw(st.booleans()),
        is_transposed=is_transposed,
        is_aligned=draw(st.booleans()),
    )


shape_lists = st.tuples(
    st.lists(layer_shapes(group_index=0), max_size=2), st.lists(layer_shapes(group_index=1), min_size=1, max_size=2)
).map(lambda lists: [*lists[0], *lists[1]])


def rows_of(table, row):
    return [row(*numbers) for numbers in table.tolist()]


def matrices_of(shapes):
    """Layer number and shape of each matrix, in order."""
    return [(number, shape) for number, shape in enumerate(shapes) for _ in range(shape.matrices)]


@given(shape_lists)
def test_tiles_cover_every_element_of_every_matrix_once(shapes):
    tables = make_tables(shapes, [], SMALL, CPU)
    matrices, tiles = rows_of(tables.matrices, MatrixRow), rows_of(tables.tiles, TileRow)
    covered = [torch.zeros(matrix.rows, matrix.columns) for matrix in matrices]
    for launch in tables.tile_launches:
        first, length = launch.tiles
        for tile in tiles[first : first + length]:
            right = tile.first_column + launch.columns
            covered[tile.matrix][tile.first_row : tile.end_row, tile.first_column : right] += 1
            _, shape = matrices_of(shapes)[tile.matrix]
            assert launch.group_index == shape.group_index
            assert tile.end_row - tile.first_row <= matrices[tile.matrix].tile_rows <= SMALL.max_repeats * launch.rows
            assert not launch.is_aligned or (shape.is_aligned and shape.columns % 4 == 0)
    assert all((one == 1).all() for one in covered)
    assert sum(launch.tiles.length for launch in tables.tile_launches) == len(tiles)


@given(shape_lists)
def test_rows_of_layers_and_matrices_refer_to_each_other(shapes):
    tables = make_tables(shapes, [], SMALL, CPU)
    matrices = rows_of(tables.matrices, MatrixRow)
    assert [matrix.layer for matrix in matrices] == [number for number, _ in matrices_of(shapes)]
    for number, (layer, shape) in enumerate(zip(rows_of(tables.layers, LayerRow), shapes, strict=True)):
        own = matrices[layer.first_matrix : layer.first_matrix + layer.matrices]
        assert [(matrix.layer, matrix.group) for matrix in own] == [(number, group) for group in range(shape.matrices)]
        assert layer.inputs == sum(matrix.inputs for matrix in own) == layer.record_length - 1
        assert all((matrix.rows, matrix.columns) == (shape.rows, shape.columns) for matrix in own)
    for group_index, (first, length) in tables.matrices_of.items():
        assert {shapes[matrix.layer].group_index for matrix in matrices[first : first + length]} == {group_index}
    assert sum(length for _, length in tables.matrices_of.values()) == len(matrices)


@given(shape_lists)
def test_blocks_cover_the_products_that_are_used(shapes):
    tables = make_tables(shapes, [], SMALL, CPU)
    blocks = rows_of(tables.blocks, BlockRow)
    for number, matrix in enumerate(rows_of(tables.matrices, MatrixRow)):
        own = blocks[matrix.first_block : matrix.first_block + matrix.blocks]
        assert all(block.matrix == number for block in own)
        starts = [[block.start for block in own if block.is_of_columns == of] for of in (0, 1)]
        has_left = matrix.outputs > 0 or matrix.is_transposed
        assert starts[0] == list(range(0, matrix.rows, SMALL.vector))
        assert starts[1] == (list(range(0, matrix.columns, SMALL.vector)) if has_left else [])


@given(shape_lists)
def test_scratch_memory_of_vectors_belongs_to_one_purpose(shapes):
    tables = make_tables(shapes, [], SMALL, CPU)
    used = torch.zeros(tables.vector_elements)
    for matrix in rows_of(tables.matrices, MatrixRow):
        sizes = {
            matrix.new_inputs_at: matrix.inputs,
            matrix.q_at: 3 * matrix.rows,
            matrix.w_at: matrix.columns,
            matrix.q_parts_at: 3 * matrix.q_parts * matrix.rows,
        }
        if matrix.outputs:
            sizes[matrix.new_outputs_at] = matrix.outputs
        if tables.has_left:
            sizes[matrix.w_parts_at] = matrix.w_parts * matrix.columns
        for start, size in sizes.items():
            assert len(used[start : start + size]) == size
            used[start : start + size] += 1
    assert (used == 1).all()


@given(st.lists(st.builds(FirstOrderShape, st.integers(0, 2), st.integers(1, 70), st.booleans()), max_size=5))
def test_chunks_cover_every_element_of_every_tensor_once(shapes):
    layer = LayerShape(0, 1, 2, 2, 1, False, False, False, True)
    tables = make_tables([layer], shapes, SMALL, CPU)
    chunks = rows_of(tables.chunks, ChunkRow) if shapes else []
    covered = [torch.zeros(shape.elements) for shape in shapes]
    for launch in tables.chunk_launches:
        first, length = launch.chunks
        for chunk in chunks[first : first + length]:
            assert 0 < chunk.end - chunk.start <= SMALL.flat
            covered[chunk.tensor][chunk.start : chunk.end] += 1
            shape = shapes[chunk.tensor]
            assert launch.group_index == shape.group_index
            assert launch.is_aligned == (shape.is_aligned and shape.elements % 4 == 0)
    assert all((one == 1).all() for one in covered)
    assert tables.counts["chunks"] == len(chunks)
