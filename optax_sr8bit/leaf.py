"""The step of a group of leaves, compiled once for all groups that are alike."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_sr8bit import partition, tile
from optax_sr8bit.codecs import Codec
from optax_sr8bit.rounding import Rounding
from optax_sr8bit.rule import Rule
from optax_sr8bit_kernels import xla
from optax_sr8bit_kernels.launch import layout
from optax_sr8bit_kernels.shard import Shard

KERNEL_DTYPES = {jnp.dtype(name) for name in ("bfloat16", "float16", "float32")}
EIGHT_BITS = {jnp.dtype(name) for name in ("float8_e4m3fn", "float8_e5m2")}


@dataclasses.dataclass(frozen=True)
class LeafSpec:
    """All that is static in the step of a leaf, beside its shape.

    Attributes:
      rule: the optimizer's rule.
      flags: its switches for this leaf.
      codec: of the moments.
      rounding: of the parameter.
      block: elements a scale, or None for float32 moments.
      dtype: of the parameter.
      grad_dtype: of the gradient.
      delta_dtype: of the update wanted, or None for the new parameter itself.
      scaled: whether gradients are multiplied with a scalar.
      leaf_scalars: how many scalars of the rule are a leaf's own.
    """

    rule: Rule
    flags: tuple[bool, ...]
    codec: Codec
    rounding: Rounding
    block: int | None
    dtype: Any
    grad_dtype: Any
    delta_dtype: Any
    scaled: bool = False
    leaf_scalars: int = 0

    @property
    def result_dtype(self) -> Any:
        """Of what the step hands back."""
        return self.dtype if self.delta_dtype is None else self.delta_dtype

    @property
    def fits_kernel(self) -> bool:
        """Whether the Triton kernel knows all dtypes; XLA steps the others (float64 and 8-bit gradients)."""
        grad, result = jnp.dtype(self.grad_dtype), jnp.dtype(self.result_dtype)
        return grad in KERNEL_DTYPES and result in KERNEL_DTYPES | EIGHT_BITS

    @property
    def corrected(self) -> bool:
        """Whether the rounding keeps something beside each parameter."""
        return self.rounding.correction_of(self.dtype) is not None

    def parts(self) -> tile.Parts:
        """The static half of the tile functions."""
        how = (self.delta_dtype, self.scaled, self.leaf_scalars)
        return tile.parts(self.rule, self.flags, self.codec, self.rounding, self.dtype, *how)

    def unpacked(self, control: jax.Array, name: jax.Array) -> tuple[tuple[jax.Array, ...], Any, tuple[jax.Array, ...]]:
        """The rule's scalars, that of gradients, and the words that address a leaf's random bits."""
        values = tuple(jax.lax.bitcast_convert_type(control[:-3], jnp.float32))
        own = tuple(jax.lax.bitcast_convert_type(name[2:], jnp.float32))
        scalars, grad_scale = (values[:-1], values[-1]) if self.scaled else (values, 1.0)
        return (*scalars, *own), grad_scale, (*control[-3:], *name[:2])


@functools.partial(jax.jit, static_argnames=("spec", "implementation", "shards"))
def step_group(params, grads, codes, scales, control, names, *, spec: LeafSpec, implementation: str, shards=None):
    """One step of several leaves.

    Args:
      params: per leaf the parameter: bfloat16, float16 or float32, any shape; all empty or none.
      grads: per leaf the gradient.
      codes: per moment, per leaf its codes, as `Codec.code_shape` and `code_dtype` say; last, where the rounding keeps
        something beside parameters, per leaf that.
      scales: per moment, per leaf its scales [..., ceil(n / block)].
      control: uint32[k + 3], the bits of the rule's float32 scalars, and if `spec.scaled` of that of gradients, the
        words of the seed, the steps taken before.
      names: uint32[leaves, 2], the words of each leaf's name.
      spec: all that is static, the same for all leaves.
      implementation: "xla", or "triton" for one launch of the kernel where the program runs on a GPU.
      shards: per leaf a `Shard` where the arrays are pieces of it, inside a `shard_map`; None outside.

    Returns:
      (per leaf the new parameter or update, per moment the new codes, per moment the new scales).
    """
    if spec.rule.measure is not None:
        spec, names = _adapted(spec, shards, (params, grads, codes, scales, control, names))
    on_gpu = implementation == "triton" and spec.fits_kernel and params[0].size
    mesh = partition.explicit_mesh(params) if shards is None else None
    # Where further axes are Auto, XLA partitions these.
    step = _on_gpu if on_gpu and (mesh is None or mesh.are_all_axes_explicit) else _xla_step
    return step(spec, shards, mesh)(params, grads, codes, scales, control, names)


@functools.partial(jax.jit, static_argnames=("spec", "shard"))
def _step_leaf(param, grad, codes, scales, control, name, *, spec: LeafSpec, shard: Shard | None):
    """One leaf on XLA; compiled by itself, so that leaves that are alike are traced once."""
    how = {"result_dtype": spec.result_dtype, "block": spec.block, "shard": shard}
    return xla.step_leaf(spec.parts(), param, grad, codes, scales, *spec.unpacked(control, name), **how)


def _adapted(spec: LeafSpec, shards, operands) -> tuple[LeafSpec, jax.Array]:
    """The spec and the names with the scalars of each leaf, which depend on norms over the whole of it."""
    assert spec.rule.adapt is not None
    mesh = partition.explicit_mesh(operands[0]) if shards is None else None
    measure = functools.partial(_sums_of_squares, spec=spec)
    if mesh is None:
        sums = measure(*operands, shards=shards)
    else:
        sums = partition.sums_over_explicit_axes(measure, mesh, spec.block)(*operands)
    *_, control, names = operands
    scalars, _, _ = spec.unpacked(control, names[0])
    own = [jnp.stack(spec.rule.adapt(tuple(jnp.sqrt(norms)), scalars, spec.flags)) for norms in sums]
    words = jax.lax.bitcast_convert_type(jnp.stack(own), jnp.uint32)
    spec = dataclasses.replace(spec, leaf_scalars=words.shape[1])
    # In an ensemble over a mesh the scalars are cut and the names are not: what is joined must be alike.
    names = jnp.asarray(names) | (words[:, :1] ^ words[:, :1])
    return spec, jnp.concatenate([names, words], axis=1)


def _sums_of_squares(params, grads, codes, scales, control, names, *, spec: LeafSpec, shards):
    """Per leaf the sums of the squares of what the rule measures, float32, over all devices that have a piece."""
    sums = []
    for i in range(len(params)):
        scalars, grad_scale, words = spec.unpacked(control, names[i])
        state = (tuple(moment[i] for moment in codes), tuple(moment[i] for moment in scales))
        here = (scalars, grad_scale, words[2] >> 31)
        part = xla.sums_of_squares(spec.parts(), params[i], grads[i], *state, *here, block=spec.block)
        over = tuple(axis for axes in shards[i].axes for axis in axes) if shards else ()
        sums.append(jax.lax.psum(part, over) if over else part)
    return tuple(sums)


def _on_xla(params, grads, codes, scales, control, names, *, spec: LeafSpec, shards):
    """One leaf after the other."""
    stepped = [
        _step_leaf(
            params[i],
            grads[i],
            tuple(moment[i] for moment in codes),
            tuple(moment[i] for moment in scales),
            control,
            names[i],
            spec=spec,
            shard=shards and shards[i],
        )
        for i in range(len(params))
    ]
    results, new_codes, new_scales = zip(*stepped, strict=True)
    return results, tuple(zip(*new_codes, strict=True)), tuple(zip(*new_scales, strict=True))


def _xla_step(spec: LeafSpec, shards, mesh):
    """The step on XLA, of what `step_group` is given, over the mesh of Explicit axes, if any."""
    if mesh is not None:
        return partition.over_explicit_axes(functools.partial(_on_xla, spec=spec), mesh, spec.block)
    return functools.partial(_on_xla, spec=spec, shards=shards)


def _on_gpu(spec: LeafSpec, shards, mesh):
    """As `_xla_step`, but the kernel where the program runs on a GPU; not under `vmap`, which no kernel call knows."""
    on_triton, on_xla = (functools.partial(one, spec=spec) for one in (_on_triton, _on_xla))

    def either(on_triton, on_xla):
        return lambda *operands: jax.lax.platform_dependent(*operands, cuda=on_triton, default=on_xla)

    def on_pieces(*operands, shards):
        return either(*(functools.partial(one, shards=shards) for one in (on_triton, on_xla)))(*operands)

    if mesh is not None:
        step = partition.over_explicit_axes(on_pieces, mesh, spec.block, opaque=True)
    elif shards is not None:
        step = functools.partial(on_pieces, shards=shards)
    else:
        step = either(partition.over_auto_axes(on_triton, spec.block), functools.partial(on_xla, shards=None))
    step = jax.custom_batching.custom_vmap(step)

    @step.def_vmap
    def batched(axis_size, in_batched, *operands):
        del axis_size
        axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, in_batched)
        results = jax.vmap(_xla_step(spec, shards, mesh), in_axes=axes)(*operands)
        return results, jax.tree.map(lambda _: True, results)

    return step


def _on_triton(*operands, spec: LeafSpec, shards):
    """One launch for all leaves, or for those whose pieces have one layout; XLA for pieces that no kernel can step."""
    from optax_sr8bit_kernels import triton_call

    def launch(operands, shards):
        how = {"result_dtype": spec.result_dtype, "block": spec.block, "shards": shards}
        return triton_call.step_group(spec.parts(), *operands, **how)

    if shards is None:
        return launch(operands, None)
    params, *_ = operands
    fits = [shard.fits_kernel(param.shape) for param, shard in zip(params, shards, strict=True)]
    kinds: dict[Any, list[int]] = {}
    for i, param in enumerate(params):
        kinds.setdefault(layout(param.shape, spec.block) if fits[i] else None, []).append(i)

    def step(part, members):
        of_part = tuple(shards[i] for i in members)
        return launch(part, of_part) if fits[members[0]] else _on_xla(*part, spec=spec, shards=of_part)

    return step_parts(operands, kinds.values(), step)


def step_parts(operands, parts, step):
    """Steps some of the leaves at a time.

    Args:
      operands: as for `step_group`, of all leaves.
      parts: the indices of the leaves that are stepped together, every leaf once.
      step: (operands of a part, its indices) -> what `step_group` returns.

    Returns:
      What `step_group` returns, of all leaves.
    """
    params, grads, codes, scales, control, names = operands
    stepped: list[Any] = [None] * len(params)
    for members in parts:
        some = tuple(
            tuple(tuple(leaves[i] for i in members) for leaves in trees) for trees in ((params, grads), codes, scales)
        )
        result, *state = step((*some[0], *some[1:], control, names[np.array(members)]), members)
        for at, i in enumerate(members):
            stepped[i] = (result[at], *([moment[at] for moment in moments] for moments in state))
    new = (
        tuple(tuple(one[part][k] for one in stepped) for k in range(len(moments)))
        for part, moments in ((1, codes), (2, scales))
    )
    return tuple(one[0] for one in stepped), *new
