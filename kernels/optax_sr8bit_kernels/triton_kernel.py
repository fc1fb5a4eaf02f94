"""The Triton kernel: loads, the tile functions, stores. Imported late: Triton is optional.

One launch steps a group of leaves. A leaf is rows of blocks, one after another; a tile is a few blocks, and a program
runs over a few tiles. `at` and `extent` are explained in `triton_memory`.
"""

import triton
import triton.language as tl

from optax_sr8bit_kernels.triton_bits import pairs, pattern_of, widen, word
from optax_sr8bit_kernels.triton_leaf import leaf_of
from optax_sr8bit_kernels.triton_memory import (
    as_stored,
    block_places,
    fetch,
    load,
    load_pairs,
    offsets,
    put,
    scale_offsets,
)
from optax_sr8bit_kernels.triton_names import all_finite, block_max, finite, static_range

# Where in `mine`, what belongs to one leaf, things are; codes, scales and results follow.
PARAM, GRAD, FIRST, ROWS, LENGTH, CODES = (tl.constexpr(i) for i in range(6))


@triton.jit
def step_leaves(
    params,
    codes,
    scales,
    results,
    grads,
    control,
    names,
    firsts,
    rows,
    lengths,
    inner,
    strides,
    parts: tl.constexpr,
    tiling: tl.constexpr,
    scalar_count: tl.constexpr,
):
    """Steps every leaf of a group.

    Args:
      params: per leaf the parameter, [rows, length]; read, and written where there are no results.
      codes: per moment, per leaf its codes, [rows, length], or half of that for codes of 4 bits; if `parts.corrected`
        last, per leaf what is kept beside the parameter, 8 or 16 bits; read and written.
      scales: per moment, per leaf its scales, [rows, ceil(length / block)]; read and written if blockwise.
      results: per leaf where the difference goes, or ().
      grads: per leaf the gradient, [rows, length].
      control: uint32 [scalar_count + 3], the bits of float32 scalars (the last one scales gradients, if
        `parts.scaled`), and what addresses the random bits of all leaves.
      names: uint32 [leaves, 2 + parts.leaf_scalars], what addresses those of each, and the bits of its own scalars;
        where leaves are pieces (`tiling.moved`) then the row and column of the whole at which each begins.
      firsts: per leaf its first program.
      rows: per leaf its rows.
      lengths: per leaf its length over `tiling.unit`.
      inner: per leaf how many of its rows follow one another in the whole, or () where all do.
      strides: per leaf how many rows of the whole lie between such runs, or ().
      parts: the static parts of the tile functions, among them `advance` and `encode`.
      tiling: a `launch.Tiling`.
      scalar_count: how many scalars.
    """
    program = tl.program_id(0)
    mine, run, leaf = leaf_of(program, params, codes, scales, results, grads, firsts, rows, lengths, inner, strides)

    values = ()
    for i in static_range(scalar_count - parts.scaled):
        values = values + (tl.load(control + i).to(tl.float32, bitcast=True),)
    grad_scale = 1.0
    if parts.scaled:
        grad_scale = tl.load(control + scalar_count - 1).to(tl.float32, bitcast=True)
    address = ()
    for i in static_range(3):
        address = address + (tl.load(control + scalar_count + i),)
    own: tl.constexpr = parts.leaf_scalars
    row_of_names = names + leaf * (2 + own + 2 * tiling.moved)
    for i in static_range(2):
        address = address + (tl.load(row_of_names + i),)
    for i in static_range(own):
        values = values + (tl.load(row_of_names + 2 + i).to(tl.float32, bitcast=True),)
    origin = ()
    if tiling.moved:
        for i in static_range(2):
            origin = origin + (tl.load(row_of_names + 2 + own + i),)
    whole = (origin, run)

    length = mine[LENGTH] * tiling.unit
    row_blocks = tl.cdiv(length, tiling.block).to(tl.uint32)
    total = mine[ROWS].to(tl.uint32) * row_blocks
    extent = (length, row_blocks, total)
    first = ((program - mine[FIRST]) * (tiling.blocks * tiling.tiles)).to(tl.uint32)
    row = first // row_blocks
    at = (first, row, first - row * row_blocks)
    rows_on = tiling.blocks // row_blocks
    step = (tiling.blocks, rows_on, tiling.blocks - rows_on * row_blocks)
    moments: tl.constexpr = len(codes) - parts.corrected
    loaded = load_tile(mine, at, extent, parts, tiling, moments, tiling.exact)
    for i in range(tiling.tiles):
        stored, rest, updated, place = advance_tile(
            loaded, values, grad_scale, address, at, row_blocks, whole, parts, tiling, moments
        )
        after = next_tile(at, step, row_blocks)
        if tiling.tiles > 1:
            # What the next tile needs is on its way while this one is encoded; after the last one there is none.
            until = (length, row_blocks, tl.where(i + 1 < tiling.tiles, total, 0))
            loaded = load_tile(mine, after, until, parts, tiling, moments, False)
        store_tile(mine, stored, rest, updated, place, address, at, extent, parts, tiling, moments)
        at = after


@triton.jit
def next_tile(at, step, row_blocks):
    """The `at` of a program's next tile."""
    column = at[2] + step[2]
    wraps = column >= row_blocks
    row = at[1] + step[1]
    return at[0] + step[0], tl.where(wraps, row + 1, row), tl.where(wraps, column - row_blocks, column)


@triton.jit
def load_tile(mine, at, extent, parts: tl.constexpr, tiling: tl.constexpr, moments: tl.constexpr, exact: tl.constexpr):
    """Loads what a tile needs: the parameter, the gradient, codes of each moment, what is kept beside, scales."""
    loaded = (load(mine[PARAM], at, extent, 0, tiling, exact), load(mine[GRAD], at, extent, 0, tiling, exact))
    for i in static_range(moments):
        if parts.code_bits == 4:
            loaded = loaded + (load_pairs(mine[CODES + i], at, extent, parts.zeros[i], tiling, exact),)
        else:
            loaded = loaded + (load(mine[CODES + i], at, extent, parts.zeros[i], tiling, exact),)
    if parts.corrected:
        loaded = loaded + (load(mine[CODES + moments], at, extent, 0, tiling, exact),)
    if parts.blockwise:
        offset, inside = scale_offsets(at, extent, tiling)
        for i in static_range(moments):
            loaded = loaded + (fetch(mine[CODES + moments + parts.corrected + i] + offset, inside, exact),)
    return loaded


@triton.jit
def advance_tile(
    loaded, values, grad_scale, address, at, row_blocks, whole,
    parts: tl.constexpr, tiling: tl.constexpr, moments: tl.constexpr,
):  # fmt: skip
    """Advances a tile that was loaded: what to store of the parameter, beside it, of moments; the elements' places.

    `whole` says where a piece lies in the whole leaf: (its first row and column, its runs of rows).
    """
    codes = ()
    scales = ()
    for i in static_range(moments):
        codes = codes + (loaded[2 + i],)
        if parts.blockwise:
            scales = scales + (loaded[2 + moments + parts.corrected + i],)
        else:
            scales = scales + (0.0,)
    kept = ()
    if parts.corrected:
        kept = pattern_of(loaded[2 + moments], parts.kept_bits)
    row, column = block_places(at, row_blocks, tiling)
    column = column * tiling.block
    if tiling.parted:
        outer = row // whole[1][0]
        row = outer * whole[1][1] + (row - outer * whole[1][0])
    if tiling.moved:
        row = row + whole[0][0]
        column = column + whole[0][1]
    place = (
        row,
        column + tl.arange(0, tiling.block)[None, :].to(tl.uint32),
        column // 8 + tl.arange(0, tiling.block // 8)[None, :].to(tl.uint32),
        column // 4 + tl.arange(0, tiling.block // 4)[None, :].to(tl.uint32),
    )
    if parts.param_bits == 8:
        param = parts.widen(word(loaded[0]))
    else:
        param = widen(loaded[0])
    stored, rest, updated = parts.advance(
        param, widen(loaded[1]), codes, scales, kept, place, values, grad_scale, address, parts
    )
    return stored, rest, updated, place


@triton.jit
def store_tile(
    mine, stored, rest, updated, place, address, at, extent,
    parts: tl.constexpr, tiling: tl.constexpr, moments: tl.constexpr,
):  # fmt: skip
    """Stores a tile that was advanced."""
    start, offset, inside = offsets(at, extent, tiling, 1, False)
    offset = start + offset
    if parts.differs:
        target = mine[len(mine) - 1]
    else:
        target = mine[PARAM]
    put(target + offset, as_stored(stored, target.dtype.element_ty), inside, tiling.exact and tiling.whole)
    if parts.corrected:
        target = mine[CODES + moments]
        put(target + offset, as_stored(rest, target.dtype.element_ty), inside, tiling.exact and tiling.whole)
    if parts.blockwise:
        absmax = block_max(updated)
        # All but ever a tile is finite. A second encoder costs nothing then; merging two sets of moments would.
        if all_finite(absmax):
            keep(mine, updated, absmax, place, address, at, extent, offset, inside, parts, tiling)
        else:
            repaired = finite(updated)
            keep(mine, repaired, block_max(repaired), place, address, at, extent, offset, inside, parts, tiling)
    elif moments > 0:
        repaired = finite(updated)
        for i in static_range(moments):
            put(mine[CODES + i] + offset, repaired[i], inside, tiling.exact and tiling.whole)


@triton.jit
def keep(mine, moments, absmax, place, address, at, extent, offset, inside, parts: tl.constexpr, tiling: tl.constexpr):
    """Encodes the moments of a tile and stores codes and scales."""
    codes, scales = parts.encode(moments, absmax, place, address, parts)
    scale_offset, exists = scale_offsets(at, extent, tiling)
    for i in static_range(len(moments)):
        code = codes[i].to(tl.uint8)
        if parts.code_bits == 4:
            if not tiling.whole:
                code = tl.where(inside, code, 0)  # what fills up the last byte of an odd row
            start, pair_offset, pair_inside = offsets(at, extent, tiling, 2, True)
            put(mine[CODES + i] + start + pair_offset, pairs(code), pair_inside, tiling.exact and tiling.whole)
        else:
            put(mine[CODES + i] + offset, code, inside, tiling.exact and tiling.whole)
        target = mine[CODES + len(moments) + parts.corrected + i]
        put(target + scale_offset, scales[i].to(target.dtype.element_ty), exists, tiling.exact)
