"""How a kernel is launched: grid, tiles, and what is constant for a group of leaves.

The bits of the results do not depend on any of it. What matters for speed, measured on an NVIDIA H200: one warp a
program, sixteen elements a thread, and a few tiles a program, which share the loads of scalars and the search for the
leaf, and of which the next is loaded while one is encoded. Steps that need many registers a parameter, with more than
two moments or with codes that are unpacked, run faster with eight elements a thread and twice the tiles: AdEMAMix by
9 %, AdamW with codes of 4 bits by 19 %.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

TILE = 512  # elements of a tile: sixteen for each thread of a warp
PROGRAMS = 8192  # an H200 runs some 2,000 at a time; with fewer in all, its multiprocessors do not end together
MOST_TILES = 4
# In a launch, which takes all pointers as arguments: 17 kB of the 32 kB that drivers since CUDA 12.1 take. A program
# finds its leaf by halving eight times.
MOST_LEAVES = 255


@dataclasses.dataclass(frozen=True)
class Launch:
    """Launch parameters of a kernel.

    Attributes:
      blocks: blocks of a tile, a power of two.
      tiles: tiles of a program.
      warps: warps of a program, a power of two.
    """

    blocks: int
    tiles: int
    warps: int


def default_launch(width: int, elements: int, heavy: bool = False) -> Launch:
    """The parameters for blocks of that width and so many elements in one launch, of a step that `is_heavy` or not."""
    tile, most_tiles = (TILE // 2, 2 * MOST_TILES) if heavy else (TILE, MOST_TILES)
    blocks = max(1, tile // width)
    tiles = max(1, elements // (blocks * width * PROGRAMS))
    return Launch(blocks, min(most_tiles, 1 << (tiles.bit_length() - 1)), max(1, width // tile))


def is_heavy(parts: Any) -> bool:
    """Whether a step with these `optax_sr8bit.tile.Parts` needs many registers a parameter."""
    return len(parts.decoders) > 2 or parts.code_bits == 4


@dataclasses.dataclass(frozen=True)
class Layout:
    """What leaves must share to be stepped by one kernel at full speed.

    Attributes:
      width: elements of a block in the kernel, a power of two; eight at least, which share one call of Philox.
      whole: whether the last axis is a multiple of width.
      wide: whether a row has as many blocks as a tile.
      unit: a power of two up to 16 that divides the last axis, which says how far rows are aligned.
    """

    width: int
    whole: bool
    wide: bool
    unit: int


def layout(shape: Sequence[int], block: int | None) -> Layout:
    """The layout of a leaf whose blocks have that length, or none."""
    n = shape[-1] if shape else 1
    width = max(8, 1 << (min(block or 256, n) - 1).bit_length())
    return Layout(width, n % width == 0, -(-n // width) >= default_launch(width, 0).blocks, math.gcd(16, n))


@dataclasses.dataclass(frozen=True)
class Tiling:
    """What is constant in the kernel beside its tile functions.

    Attributes:
      unit: what all lengths are multiples of, which says how far rows are aligned.
      block: elements of a block, a power of two.
      blocks: blocks of a tile, a power of two.
      tiles: tiles of a program.
      whole: whether lengths are multiples of block.
      exact: whether the programs of a leaf cover just its blocks.
      wide: whether a row has `blocks` blocks at least.
      moved: whether leaves are pieces, which begin elsewhere than at the first row and column of the whole.
      parted: whether their rows, too, are not one after another in the whole.
    """

    unit: int
    block: int
    blocks: int
    tiles: int
    whole: bool
    exact: bool
    wide: bool
    moved: bool
    parted: bool

    @property
    def cache_key(self) -> str:
        """What Triton's cache on disk tells kernels apart by."""
        return repr(self)


@dataclasses.dataclass(frozen=True)
class Grid:
    """The grid of a launch over a group of leaves.

    Attributes:
      programs: how many.
      firsts: per leaf its first program.
      rows: per leaf its rows.
      lengths: per leaf its last axis, in units of `tiling.unit`.
      inner: per leaf how many rows follow one another in the whole, or () where all do; see `Shard.runs`.
      strides: per leaf how many rows of the whole lie between such runs, or ().
      tiling: what is constant.
      warps: of a program.
    """

    programs: int
    firsts: tuple[int, ...]
    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    inner: tuple[int, ...]
    strides: tuple[int, ...]
    tiling: Tiling
    warps: int


def grid(
    shapes: Sequence[Sequence[int]],
    block: int | None,
    how: Launch | None = None,
    runs: Sequence[tuple[int, int]] | None = None,
    heavy: bool = False,
) -> Grid:
    """The grid over leaves of these shapes, none of them empty and all of one `Layout.width`.

    Args:
      shapes: per leaf its shape.
      block: the length of full blocks, or None where there are no scales.
      how: launch parameters, by default `default_launch`.
      runs: per leaf `Shard.runs` where leaves are pieces.
      heavy: whether the step `is_heavy`.
    """
    layouts = [layout(shape, block) for shape in shapes]
    width, unit = layouts[0].width, math.gcd(*(one.unit for one in layouts))
    sizes = [math.prod(shape) for shape in shapes]
    how = how or default_launch(width, sum(sizes), heavy)
    lengths = [shape[-1] if shape else 1 for shape in shapes]
    rows = [size // n for size, n in zip(sizes, lengths, strict=True)]
    row_blocks = [-(-n // width) for n in lengths]
    blocks = [r * b for r, b in zip(rows, row_blocks, strict=True)]
    programs = [-(-b // (how.blocks * how.tiles)) for b in blocks]
    tiling = Tiling(
        unit=unit,
        block=width,
        blocks=how.blocks,
        tiles=how.tiles,
        whole=all(one.whole for one in layouts),
        exact=all(b % (how.blocks * how.tiles) == 0 for b in blocks),
        wide=all(b >= how.blocks for b in row_blocks),
        moved=runs is not None,
        parted=runs is not None and any(inner != r for (inner, _), r in zip(runs, rows, strict=True)),
    )
    return Grid(
        programs=sum(programs),
        firsts=tuple(sum(programs[:i]) for i in range(len(programs))),
        rows=tuple(rows),
        lengths=tuple(n // unit for n in lengths),
        inner=tuple(inner for inner, _ in runs or ()) if tiling.parted else (),
        strides=tuple(stride for _, stride in runs or ()) if tiling.parted else (),
        tiling=tiling,
        warps=how.warps,
    )
