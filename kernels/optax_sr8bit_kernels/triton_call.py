"""The Triton back end: calls the kernel through jax-triton, in place. Imported late: jax-triton is optional."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax_triton  # pyright: ignore[reportMissingImports]
from jax.experimental.pallas import run_state

from optax_sr8bit_kernels.launch import Launch, grid, is_heavy
from optax_sr8bit_kernels.obstacle import ptx_version
from optax_sr8bit_kernels.retarget import to_triton
from optax_sr8bit_kernels.shard import Shard
from optax_sr8bit_kernels.triton_kernel import step_leaves

Array = jax.Array


def step_group(
    parts: Any,
    params: Sequence[Array],
    grads: Sequence[Array],
    codes: Sequence[Sequence[Array]],
    scales: Sequence[Sequence[Array]],
    control: Array,
    names: Array,
    *,
    result_dtype: Any,
    block: int | None,
    how: Launch | None = None,
    shards: Sequence[Shard] | None = None,
) -> tuple[tuple[Array, ...], tuple[tuple[Array, ...], ...], tuple[tuple[Array, ...], ...]]:
    """Steps a group of leaves in one launch; they may differ in shape alone, not in `Layout.width`; none may be empty.

    Parameters, codes and scales are updated in place where the caller lets XLA do so, by donation for one.

    Args:
      parts: the tile functions `advance` and `encode`, and what else is static, see `optax_sr8bit.tile.Parts`.
      params: per leaf bfloat16, float16, float32 or an 8-bit float, any shape, one dtype for all.
      grads: per leaf its gradient, one dtype for all.
      codes: as `xla.step_leaf` takes them, per leaf.
      scales: likewise.
      control: uint32 [k + 3]: the bits of k float32 scalars for the tile functions, and what addresses the random bits
        of all leaves.
      names: uint32 [leaves, 2 + m], what addresses those of each, and the bits of m scalars of its own.
      result_dtype: of the new parameters, or of the differences that `parts` say to hand back.
      block: the length of full blocks, or None where scales are handed on untouched.
      how: the launch, by default what was measured to be best.
      shards: per leaf how it is cut, where the arrays are pieces that `Shard.fits_kernel`.

    Returns:
      (per leaf the result, per moment the new codes, per moment the new scales).
    """
    runs = None
    if shards is not None:
        origins = [shard.origin(p.shape) for shard, p in zip(shards, params, strict=True)]
        names = jnp.concatenate([names, jnp.stack([jnp.stack(origin) for origin in origins])], axis=1)
        runs = [shard.runs(p.shape) for shard, p in zip(shards, params, strict=True)]
    over = grid([p.shape for p in params], block, how, runs, is_heavy(parts))
    # What a kernel writes it gets as refs. One that is only read would be copied where the caller still uses its array.
    eight = params[0].dtype.itemsize == 1  # whose format the tile functions know
    if eight:
        params = tuple(jax.lax.bitcast_convert_type(p, jnp.uint8) for p in params)
    written = {"codes": tuple(map(tuple, codes)), "scales": tuple(map(tuple, scales)) if parts.blockwise else ()}
    if parts.differs:
        written["results"] = tuple(_empty_like(p, result_dtype) for p in params)
    else:
        written["params"] = tuple(params)

    def launch(refs: dict[str, Any]) -> None:
        jax_triton.triton_call(
            refs.get("params", tuple(params)),
            refs["codes"],
            refs["scales"],
            refs.get("results", ()),
            tuple(grads),
            control,
            names,
            over.firsts,
            over.rows,
            over.lengths,
            over.inner,
            over.strides,
            kernel=step_leaves,
            out_type=(),
            grid=over.programs,
            num_warps=over.warps,
            num_stages=1,
            backend_options={"enable_fp_fusion": True, "ptx_version": ptx_version()},
            parts=to_triton(parts),
            scalar_count=control.shape[0] - 3,
            tiling=over.tiling,
        )

    # Not `jax.new_ref`, whose effects `custom_partitioning` refuses.
    new = run_state(launch)(written)
    results = new["results"] if parts.differs else new["params"]
    if eight:
        results = tuple(jax.lax.bitcast_convert_type(x, result_dtype) for x in results)
    return results, new["codes"], new["scales"] or tuple(map(tuple, scales))


def _empty_like(param: Array, dtype: Any) -> Array:
    """An array of the parameter's shape and, inside a `shard_map`, type, that holds anything."""
    varying = getattr(getattr(jax.typeof(param), "manual_axis_type", None), "varying", frozenset())
    empty = jax.lax.empty(param.shape, dtype)
    return jax.lax.pcast(empty, tuple(varying), to="varying") if varying else empty
