"""Where the piece of a leaf that a device holds lies in the whole: random bits are addressed by global coordinates."""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Shard:
    """How a leaf is cut over the axes of a mesh.

    Attributes:
      shape: of the whole leaf.
      axes: per axis of the leaf the names of the mesh's axes that cut it, major first; () where it is whole.
    """

    shape: tuple[int, ...]
    axes: tuple[tuple[str, ...], ...]

    @property
    def whole(self) -> bool:
        """Whether nothing is cut."""
        return not any(self.axes)

    def start(self, local: Sequence[int]) -> tuple[jax.Array, ...]:
        """Where the piece of this device begins, uint32 per axis; only where the mesh's axes are manual.

        Args:
          local: the shape of a piece.
        """
        index = (jax.lax.axis_index(names).astype(jnp.uint32) if names else jnp.uint32(0) for names in self.axes)
        return tuple(i * np.uint32(n) for i, n in zip(index, local, strict=True))

    def stride(self, axis: int) -> int:
        """How many rows of the whole leaf lie between neighbours along a leading axis, modulo 2**32."""
        return math.prod(self.shape[axis + 1 : -1]) % 2**32

    def origin(self, local: Sequence[int]) -> tuple[jax.Array, jax.Array]:
        """The row (leading axes flattened, modulo 2**32) and the column where the piece begins, uint32."""
        start = self.start(local)
        row = jnp.uint32(0)
        for axis in range(len(local) - 1):
            row = row + start[axis] * np.uint32(self.stride(axis))
        return row, start[-1] if start else jnp.uint32(0)

    def fits_kernel(self, local: Sequence[int]) -> bool:
        """Whether the Triton kernel can step such pieces: eight neighbours share a call of Philox, rows lie in runs."""
        try:
            self.runs(local)
        except ValueError:
            return False
        return not self.axes or not self.axes[-1] or local[-1] % 8 == 0

    def runs(self, local: Sequence[int]) -> tuple[int, int]:
        """Where the rows of a piece lie in the whole: (inner, stride).

        Row r of the piece is row r // inner * stride + r % inner of the whole, counted from the piece's `origin`.

        Raises:
          ValueError: where two numbers do not say it: two leading axes behind another one are cut.
        """
        runs: list[list[int]] = []  # (rows, stride) from the innermost leading axis outwards
        for axis in reversed(range(len(local) - 1)):
            if local[axis] == 1:
                continue
            stride = self.stride(axis)
            if runs and runs[-1][0] * runs[-1][1] == stride:
                runs[-1][0] *= local[axis]
            else:
                runs.append([local[axis], stride])
        if not runs or (len(runs) == 1 and runs[0][1] == 1):
            return math.prod(local[:-1]), 0
        if len(runs) == 1:
            runs = [[1, 1], *runs]
        if len(runs) > 2 or runs[0][1] != 1 or runs[1][1] >= 2**31:
            raise ValueError(f"the rows of {list(local)} in {list(self.shape)} are no runs of one length and stride")
        return runs[0][0], runs[1][1]
