"""The Triton back end: calls the kernel through jax-triton, in place. Imported late: jax-triton is optional."""

from collections.abc import Sequence
from typing import Any

import jax
import jax_triton  # pyright: ignore[reportMissingImports]

from optax_sr8bit_kernels.launch import Launch, grid
from optax_sr8bit_kernels.obstacle import ptx_version
from optax_sr8bit_kernels.retarget import to_triton
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
) -> tuple[tuple[Array, ...], tuple[tuple[Array, ...], ...], tuple[tuple[Array, ...], ...]]:
    """Steps a group of leaves in one launch; they may differ in shape alone, not in `Layout.width`; none may be empty.

    Parameters, codes and scales are updated in place where the caller lets XLA do so, by donation for one.

    Args:
      parts: the tile functions `advance` and `encode`, and what else is static, see `optax_sr8bit.tile.Parts`.
      params: per leaf bfloat16, float16 or float32, any shape, one dtype for all.
      grads: per leaf its gradient, one dtype for all.
      codes: per moment, per leaf uint8 (float32 where block is None) of the parameter's shape.
      scales: per moment, per leaf float32 [..., ceil(n / block)].
      control: uint32 [k + 3]: the bits of k float32 scalars for the tile functions, and what addresses the random bits
        of all leaves.
      names: uint32 [leaves, 2], what addresses those of each.
      result_dtype: of the new parameters, or of the differences that `parts` say to hand back.
      block: the length of full blocks, or None where scales are handed on untouched.
      how: the launch, by default what was measured to be best.

    Returns:
      (per leaf the result, per moment the new codes, per moment the new scales).
    """
    over = grid([p.shape for p in params], block, how)
    # A ref that is only read would be copied where the caller goes on to use its array.
    param_refs: tuple[Any, ...] = tuple(params) if parts.differs else tuple(jax.new_ref(p) for p in params)
    code_refs = tuple(tuple(jax.new_ref(c) for c in moment) for moment in codes)
    scale_refs = tuple(tuple(jax.new_ref(s) for s in moment) for moment in scales) if parts.blockwise else ()
    result_refs = ()
    if parts.differs:
        result_refs = tuple(jax.empty_ref(jax.ShapeDtypeStruct(p.shape, result_dtype)) for p in params)
    jax_triton.triton_call(
        param_refs,
        code_refs,
        scale_refs,
        result_refs,
        tuple(grads),
        control,
        names,
        over.firsts,
        over.rows,
        over.lengths,
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
    results = tuple(jax.freeze(ref) for ref in (result_refs or param_refs))
    new_codes = tuple(tuple(jax.freeze(ref) for ref in moment) for moment in code_refs)
    new_scales = tuple(tuple(jax.freeze(ref) for ref in moment) for moment in scale_refs)
    return results, new_codes, new_scales or tuple(map(tuple, scales))
