"""The Triton kernel: loads, the tile function, stores. Imported late: Triton is optional.

One launch steps a group of leaves. A leaf is rows of blocks, one after another; a tile is a few blocks, and a program
runs over a few tiles.
"""

import triton
import triton.language as tl

from optax_sr8bit_kernels.triton_names import all_finite, block_max, finite, static_range, widen


@triton.jit
def step_leaves(
    params,
    codes,
    scales,
    results,
    grads,
    scalars,
    words,
    names,
    firsts,
    rows,
    lengths,
    parts: tl.constexpr,
    scalar_count: tl.constexpr,
    length_unit: tl.constexpr,
    block: tl.constexpr,
    blocks: tl.constexpr,
    tiles: tl.constexpr,
    whole: tl.constexpr,
    exact: tl.constexpr,
    wide: tl.constexpr,
):
    """Steps every leaf of a group.

    Args:
      params: per leaf the parameter, [rows, length]; read, and written where there are no results.
      codes: per moment, per leaf its codes, [rows, length]; read and written.
      scales: per moment, per leaf its scales, float32 [rows, ceil(length / block)]; read and written if blockwise.
      results: per leaf where the difference goes, or ().
      grads: per leaf the gradient, [rows, length].
      scalars: float32 [scalar_count].
      words: uint32 [3], what addresses the random bits of all leaves.
      names: uint32 [leaves, 2], what addresses those of each.
      firsts: per leaf its first program.
      rows: per leaf its rows.
      lengths: per leaf its length over length_unit.
      parts: the static parts of the tile function, among them `step`, itself.
      scalar_count: how many scalars.
      length_unit: what all lengths are multiples of, which says how far rows are aligned.
      block: elements of a block, a power of two.
      blocks: blocks of a tile, a power of two.
      tiles: tiles of a program.
      whole: whether lengths are multiples of block.
      exact: whether the programs of a leaf cover just its blocks.
      wide: whether a row has `blocks` blocks at least.
    """
    moments_count: tl.constexpr = len(codes)
    columns = (params, grads, firsts, rows, lengths)
    for i in static_range(moments_count):
        columns = columns + (codes[i],)
    if parts.blockwise:
        for i in static_range(moments_count):
            columns = columns + (scales[i],)
    if parts.differs:
        columns = columns + (results,)
    program = tl.program_id(0)
    mine, leaf = leaf_of(program, firsts, columns, 0)

    length = mine[4] * length_unit
    row_blocks = tl.cdiv(length, block).to(tl.uint32)
    total = mine[3].to(tl.uint32) * row_blocks
    values = ()
    for i in static_range(scalar_count):
        values = values + (tl.load(scalars + i),)
    address = ()
    for i in static_range(3):
        address = address + (tl.load(words + i),)
    for i in static_range(2):
        address = address + (tl.load(names + 2 * leaf + i),)

    first = ((program - mine[2]) * (blocks * tiles)).to(tl.uint32)
    row = first // row_blocks
    column = first - row * row_blocks
    for _ in range(tiles):
        step_tile(
            mine, values, address, first, row, column, row_blocks, length, total,
            parts, moments_count, block, blocks, whole, exact, wide,
        )  # fmt: skip
        first += blocks
        if wide:
            column += blocks
            wraps = column >= row_blocks
            row = tl.where(wraps, row + 1, row)
            column = tl.where(wraps, column - row_blocks, column)
        else:
            row = first // row_blocks
            column = first - row * row_blocks


@triton.jit
def leaf_of(program, firsts, columns, index):
    """What belongs to the leaf of a program: one of each of the columns, and the leaf's index; by halving."""
    if len(firsts) == 1:
        mine = ()
        for i in static_range(len(columns)):
            mine = mine + (columns[i][0],)
        leaf = index
    else:
        half: tl.constexpr = len(firsts) // 2
        low = ()
        high = ()
        for i in static_range(len(columns)):
            low = low + (columns[i][:half],)
            high = high + (columns[i][half:],)
        if program < firsts[half]:
            mine, leaf = leaf_of(program, firsts[:half], low, index)
        else:
            mine, leaf = leaf_of(program, firsts[half:], high, index + half)
    return mine, leaf


@triton.jit
def step_tile(
    mine, values, address, first, row, column, row_blocks, length, total,
    parts: tl.constexpr, moments_count: tl.constexpr, block: tl.constexpr, blocks: tl.constexpr,
    whole: tl.constexpr, exact: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    """Steps `blocks` blocks of a leaf from `first` on, which is the `column`-th of its row."""
    one = tl.arange(0, blocks)[:, None].to(tl.uint32)
    if wide:
        column = column + one
        wraps = column >= row_blocks
        row_of = tl.where(wraps, row + 1, row)
        column = tl.where(wraps, column - row_blocks, column)
    else:
        row_of = (first + one) // row_blocks
        column = first + one - row_of * row_blocks
    column = column * block
    lane = tl.arange(0, block)[None, :]
    if whole:
        start = first.to(tl.int64) * block
        at = one * block + lane
    else:
        start = row.to(tl.int64) * length
        at = (row_of - row) * length + column + lane
    # A thread holds eight neighbours, of any dtype, so that all tensors of a tile share one layout.
    at = tl.max_contiguous(at, (1, 8))
    here = first + one < total
    inside = None if exact else here
    if not whole:
        inside = here & (column + lane < length)
    at_scale = first + one
    scale_inside = None if exact else here

    param = widen(load(mine[0] + start + at, inside, 0.0, whole))
    grad = widen(load(mine[1] + start + at, inside, 0.0, whole))
    codes = ()
    scales = ()
    for i in static_range(moments_count):
        codes = codes + (load(mine[5 + i] + start + at, inside, parts.zeros[i], whole),)
        if parts.blockwise:
            scales = scales + (tl.load(mine[5 + moments_count + i] + at_scale, scale_inside),)
        else:
            scales = scales + (0.0,)
    place = (
        row_of.to(tl.uint32),
        (column + lane).to(tl.uint32),
        row_of.to(tl.uint32),
        ((column // 8) + tl.arange(0, block // 8)[None, :]).to(tl.uint32),
        row_of.to(tl.uint32),
        ((column // 4) + tl.arange(0, block // 4)[None, :]).to(tl.uint32),
    )
    stored, moments = parts.advance(param, grad, codes, scales, place, values, address, parts)
    if parts.differs:
        target = mine[5 + 2 * moments_count if parts.blockwise else 5 + moments_count]
    else:
        target = mine[0]
    tl.store(target + start + at, as_stored(stored, target.dtype.element_ty), inside)
    if parts.blockwise:
        absmax = block_max(moments)
        # All but ever a tile is finite. A second encoder costs nothing then; merging two sets of moments would.
        if all_finite(absmax):
            codes, scales = parts.encode(moments, absmax, place, address, parts)
            save(mine, codes, scales, start + at, inside, at_scale, scale_inside, moments_count)
        else:
            moments = finite(moments)
            codes, scales = parts.encode(moments, block_max(moments), place, address, parts)
            save(mine, codes, scales, start + at, inside, at_scale, scale_inside, moments_count)
    else:
        moments = finite(moments)
        for i in static_range(moments_count):
            tl.store(mine[5 + i] + start + at, moments[i], inside)


@triton.jit
def save(mine, codes, scales, at, inside, at_scale, scale_inside, moments_count: tl.constexpr):
    """Stores codes and scales."""
    for i in static_range(moments_count):
        tl.store(mine[5 + i] + at, codes[i].to(tl.uint8), inside)
        tl.store(mine[5 + moments_count + i] + at_scale, scales[i], scale_inside)


@triton.jit
def load(pointers, inside, other, whole: tl.constexpr):
    """Loads; a row that ends within its last block is filled up, while blocks that do not exist hold anything."""
    if whole:
        return tl.load(pointers, inside)
    else:
        return tl.load(pointers, inside, other)


@triton.jit
def as_stored(x, dtype: tl.constexpr):
    """A 16-bit pattern in a uint32 as a 16-bit float; a float32 as itself."""
    if dtype == tl.float32:
        return x
    else:
        return x.to(tl.uint16).to(dtype, bitcast=True)
