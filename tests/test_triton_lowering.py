"""The math is written once: every rule, codec and rounding compiles for NVIDIA GPUs, from the functions XLA runs."""

import jax.numpy as jnp
import pytest

import optax_sr8bit as sr8
from optax_sr8bit import codecs, rounding, tile
from optax_sr8bit_kernels.retarget import to_triton

triton = pytest.importorskip("triton", reason="Triton cannot be installed here")
tl = triton.language
compiler = pytest.importorskip("triton.compiler")
from triton.backends.compiler import GPUTarget  # noqa: E402

OPTIMIZERS = {
    "adamw": (sr8.adamw(1e-3), 10),
    "adamw_nesterov": (sr8.adamw(1e-3, nesterov=True), 10),
    "adam": (sr8.adam(1e-3), 10),
    "lion": (sr8.lion(1e-3), 4),
}
CODECS = {
    **codecs.CODECS,
    "offset_philox": codecs.Offset(dither="philox"),
    "offset_nearest": codecs.Offset(dither="nearest"),
    "offset_wide_philox": codecs.OffsetWide(dither="philox"),
}
PARAMS = {jnp.bfloat16: "*bf16", jnp.float16: "*fp16", jnp.float32: "*fp32"}
CAPABILITIES = (80, 90, 100)
ROWS, BLOCK = 1, 32  # one element a thread: the least code to compile


@triton.jit
def kernel(  # the least that lets a fused step compile: loads, the tile function, stores
    param_ptr,
    grad_ptr,
    code_ptrs,
    scale_ptrs,
    table_ptrs,
    scalar_ptr,
    word_ptr,
    step: tl.constexpr,
    rule: tl.constexpr,
    flags: tl.constexpr,
    draw: tl.constexpr,
    round_to: tl.constexpr,
    decoders: tl.constexpr,
    floors: tl.constexpr,
    dithers: tl.constexpr,
    encoders: tl.constexpr,
    rescalers: tl.constexpr,
    tinies: tl.constexpr,
    blockwise: tl.constexpr,
    scalar_count: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0) * rows + tl.arange(0, rows)[:, None]
    col = tl.arange(0, block)[None, :]
    at = row * block + col
    codes = ()
    scales = ()
    for i in tl.static_range(len(code_ptrs)):
        code = tl.load(code_ptrs[i] + at)
        codes = codes + (code.to(tl.uint32) if blockwise else code,)
        scales = scales + (tl.load(scale_ptrs[i] + row),)
    scalars = ()
    for i in tl.static_range(scalar_count):
        scalars = scalars + (tl.load(scalar_ptr + i),)
    words = ()
    for i in tl.static_range(5):
        words = words + (tl.load(word_ptr + i),)
    full = tl.zeros([rows, block], tl.uint32)
    stored, codes, scales = step(
        tl.load(param_ptr + at).to(tl.float32),
        tl.load(grad_ptr + at).to(tl.float32),
        codes,
        scales,
        None,
        full + row.to(tl.uint32),
        full + col.to(tl.uint32),
        table_ptrs,
        scalars,
        words,
        rule,
        flags,
        draw,
        round_to,
        decoders,
        floors,
        dithers,
        encoders,
        rescalers,
        tinies,
        blockwise,
    )
    if param_ptr.dtype.element_ty == tl.float32:
        tl.store(param_ptr + at, stored)
    else:
        tl.store(param_ptr + at, stored.to(tl.uint16).to(param_ptr.dtype.element_ty, bitcast=True))
    for i in tl.static_range(len(code_ptrs)):
        tl.store(code_ptrs[i] + at, codes[i].to(code_ptrs[i].dtype.element_ty))
        tl.store(scale_ptrs[i] + row, scales[i])


def retarget(part):
    """A static argument of the tile function as a kernel takes it."""
    if isinstance(part, tuple):
        return tuple(map(retarget, part))
    return to_triton(part) if callable(part) else part


def lower(optimizer, codec, how, dtype, capability):
    """The PTX of one combination."""
    tx, scalar_count = OPTIMIZERS[optimizer]
    rule = tx.definition.rule
    codes = [CODECS[codec].code(m.signed) for m in rule.moments]
    parts = tile.parts(rule, rule.flags, CODECS[codec], rounding.get(how), dtype)
    constants = {name: retarget(part) for name, part in parts.items()}
    constants |= {"step": to_triton(tile.fused_step), "scalar_count": scalar_count, "rows": ROWS, "block": BLOCK}
    n = len(rule.moments)
    signature = {
        "param_ptr": PARAMS[dtype],
        "grad_ptr": "*bf16",
        "code_ptrs": ("*u8" if CODECS[codec].blockwise else "*fp32",) * n,
        "scale_ptrs": ("*fp32",) * n,
        "table_ptrs": tuple("constexpr" if c.table is None else "*fp32" for c in codes),
        "scalar_ptr": "*fp32",
        "word_ptr": "*u32",
    }
    source = compiler.ASTSource(kernel, signature | dict.fromkeys(constants, "constexpr"), constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 1}).asm["ptx"]


@pytest.mark.parametrize("how", list(rounding.ROUNDINGS))
@pytest.mark.parametrize("codec", list(codecs.CODECS))
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_rule_codec_and_rounding_compiles(capability, optimizer, codec, how):
    assert f".target sm_{capability}" in lower(optimizer, codec, how, jnp.bfloat16, capability)


@pytest.mark.parametrize("codec", [name for name in CODECS if name not in codecs.CODECS])
@pytest.mark.parametrize("optimizer", ["adamw", "lion"])
def test_every_dither_compiles(optimizer, codec):
    assert ".target sm_90" in lower(optimizer, codec, "stochastic", jnp.bfloat16, 90)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
@pytest.mark.parametrize("how", list(rounding.ROUNDINGS))
def test_every_parameter_dtype_compiles(dtype, how):
    assert ".target sm_90" in lower("adamw", "offset", how, dtype, 90)
