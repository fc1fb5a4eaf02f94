"""Where the tiles of a leaf lie in memory; loads and stores of what a tile has one of for each element.

Throughout, `at` is (first block of a tile, its row, which of its row's blocks it is), and `extent` is (length of a row,
its blocks, blocks of the leaf).
"""

import triton
import triton.language as tl

from optax_sr8bit_kernels.triton_bits import nibbles


@triton.jit
def block_places(at, row_blocks, tiling: tl.constexpr):
    """The row of each block of a tile, and which of its row's blocks it is."""
    one = tl.arange(0, tiling.blocks)[:, None].to(tl.uint32)
    if tiling.wide:
        column = at[2] + one
        wraps = column >= row_blocks
        row = tl.where(wraps, at[1] + 1, at[1])
        column = tl.where(wraps, column - row_blocks, column)
    else:
        row = (at[0] + one) // row_blocks
        column = at[0] + one - row * row_blocks
    return row, column


@triton.jit
def offsets(at, extent, tiling: tl.constexpr, each: tl.constexpr, pairs: tl.constexpr):
    """Where a tile lies in its leaf, `each` elements at a time: the start, offsets from it, which of these exist.

    With `pairs`, where rows of an odd length take a byte more than half of it.
    """
    one = tl.arange(0, tiling.blocks)[:, None]
    lane = tl.arange(0, tiling.block // each)[None, :]
    here = at[0] + one.to(tl.uint32) < extent[2]
    if tiling.whole:
        start = at[0].to(tl.int64) * (tiling.block // each)
        offset = one * (tiling.block // each) + lane
        inside = here
    else:
        length = extent[0]
        if pairs:
            length = (length + 1) // 2
        row, column = block_places(at, extent[1], tiling)
        ahead = (column - at[2]).to(tl.int32) * (tiling.block // each) + lane  # in the row; before may exceed 32 bits
        before = at[2].to(tl.int64) * (tiling.block // each)
        start = at[1].to(tl.int64) * length + before
        offset = (row - at[1]).to(tl.int32) * length + ahead
        inside = here & (ahead < length - before)
    # A thread holds eight neighbours, of any dtype, so that all tensors of a tile share one layout.
    return start, tl.max_contiguous(offset, (1, 8 // each)), inside


@triton.jit
def scale_offsets(at, extent, tiling: tl.constexpr):
    """Where the scales of a tile lie, and which exist."""
    block = at[0] + tl.arange(0, tiling.blocks)[:, None].to(tl.uint32)
    return block, block < extent[2]


@triton.jit
def load(pointer, at, extent, other, tiling: tl.constexpr, exact: tl.constexpr):
    """Loads a tile; of 8 and of most 16 bits, where blocks are aligned, in words of 32 bits, which registers keep.

    A row that ends within its last block is filled up with `other`, while blocks that do not exist hold anything.
    """
    dtype: tl.constexpr = pointer.dtype.element_ty
    if not tiling.whole:
        start, offset, inside = offsets(at, extent, tiling, 1, False)
        return tl.load(pointer + start + offset, inside, other)
    elif dtype == tl.uint8:
        start, offset, inside = offsets(at, extent, tiling, 4, False)
        return fetch(pointer.to(tl.pointer_type(tl.uint32), bitcast=True) + start + offset, inside, exact)
    elif dtype == tl.bfloat16 or dtype == tl.uint16:
        start, offset, inside = offsets(at, extent, tiling, 2, False)
        return fetch(pointer.to(tl.pointer_type(tl.uint32), bitcast=True) + start + offset, inside, exact)
    else:
        start, offset, inside = offsets(at, extent, tiling, 1, False)
        return fetch(pointer + start + offset, inside, exact)


@triton.jit
def load_pairs(pointer, at, extent, other: tl.constexpr, tiling: tl.constexpr, exact: tl.constexpr):
    """Loads codes of 4 bits as bytes, packed as `load` packs them."""
    if tiling.whole:
        start, offset, inside = offsets(at, extent, tiling, 8, True)
        return nibbles(fetch(pointer.to(tl.pointer_type(tl.uint32), bitcast=True) + start + offset, inside, exact))
    else:
        start, offset, inside = offsets(at, extent, tiling, 2, True)
        return nibbles(tl.load(pointer + start + offset, inside, other * 17))


@triton.jit
def fetch(pointers, inside, exact: tl.constexpr):
    """Loads, unmasked where everything exists."""
    if exact:
        return tl.load(pointers)
    else:
        return tl.load(pointers, inside)


@triton.jit
def put(pointers, x, inside, exact: tl.constexpr):
    """Stores, unmasked where everything exists."""
    if exact:
        tl.store(pointers, x)
    else:
        tl.store(pointers, x, inside)


@triton.jit
def as_stored(x, dtype: tl.constexpr):
    """The pattern in a uint32 as a value of 8 or 16 bits; a float32 as itself."""
    if dtype == tl.float32:
        return x
    elif dtype == tl.uint8:
        return x.to(tl.uint8)
    else:
        return x.to(tl.uint16).to(dtype, bitcast=True)
