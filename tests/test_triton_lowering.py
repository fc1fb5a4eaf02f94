"""The kernel compiles for NVIDIA GPUs in every variant, without one, and stays as cheap as it was measured to be."""

import jax.numpy as jnp
import pytest
import sass
from kernel_cases import CODECS, CORRECTED, E4M3, E5M2, OTHERS, ROUNDINGS, control
from tables import ADAMW, BF16, F16, F32, LION, OPTIMIZERS, named

from optax_sr8bit import codecs, rounding, tile
from optax_sr8bit_kernels.launch import grid, is_heavy
from optax_sr8bit_kernels.retarget import to_triton

triton = pytest.importorskip("triton", reason="Triton cannot be installed here")
compiler = pytest.importorskip("triton.compiler")
from triton.backends.compiler import GPUTarget  # noqa: E402

from optax_sr8bit_kernels.triton_kernel import step_leaves  # noqa: E402

pytestmark = pytest.mark.slow  # of JAX it needs next to nothing

VARIANTS = {
    "offset_philox": codecs.Offset(dither="philox"),
    "offset_nearest": codecs.Offset(dither="nearest"),
    "offset_wide_philox": codecs.OffsetWide(dither="philox"),
    "fp8_nearest": codecs.Fp8(dither="nearest"),
    "offset_exponents": codecs.Offset(scales="power_of_two"),
    "four_bit_exponents": codecs.FourBit(scales="power_of_two"),
}
POINTERS = {BF16: "*bf16", F16: "*fp16", F32: "*fp32", E4M3: "*u8", E5M2: "*u8", jnp.uint8: "*u8", jnp.uint16: "*u16"}
CAPABILITIES = (80, 90, 100)
EVERY_CODEC, EVERY_ROUNDING = (*CODECS, *OTHERS), (*ROUNDINGS, *CORRECTED)
SMALL, LARGE = ((16, 512),), ((8192, 4096),)
SHAPES = {
    "ragged": ((64, 300),),
    "unaligned": ((64, 257),),
    "short_rows": ((64, 256),),
    "narrow": ((200, 32),),
    "inexact": ((3, 256),),
    "several": ((64, 512), (16, 256), (64, 768)),
    "ragged_several": ((64, 300), (16, 257)),
    "most": ((16, 512),) * 255,
    "tiles": LARGE,
}


def lower(
    opt,
    codec="offset",
    how="stochastic",
    dtype=BF16,
    grad=BF16,
    delta=None,
    shapes=SMALL,
    capability=90,
    runs=None,
    scaled=False,
):
    """Compiles as jax-triton would: pointers are aligned, lengths and rows are not constants."""
    rule, scalar_count = opt().definition.rule, len(control(opt.name, 0)) - 3
    codec, rounded = VARIANTS.get(codec) or codecs.get(codec), rounding.get(how)
    own = 1 if rule.measure is not None else 0
    parts = tile.parts(rule, rule.flags, codec, rounded, dtype, delta, scaled, own)
    over = grid(shapes, 256 if codec.blockwise else None, None, runs, is_heavy(parts))
    n, leaves = len(rule.moments), len(shapes)
    beside = ((POINTERS[rounded.correction],) * leaves,) if parts.corrected else ()
    arguments = {
        "params": (POINTERS[dtype],) * leaves,
        "codes": (*(((POINTERS[codec.code_dtype],) * leaves,) * n), *beside),
        "scales": ((POINTERS[codec.scale_dtype],) * leaves,) * n if codec.blockwise else (),
        "results": (POINTERS[delta],) * leaves if delta else (),
        "grads": (POINTERS[grad],) * leaves,
        "control": "*u32",
        "names": "*u32",
        **dict.fromkeys(("firsts", "rows", "lengths"), ("i32",) * leaves),
        **dict.fromkeys(("inner", "strides"), ("i32",) * len(over.inner)),
    }
    scalar_count += scaled
    constants = {"parts": to_triton(parts), "tiling": over.tiling, "scalar_count": scalar_count}
    signature = arguments | dict.fromkeys(constants, "constexpr")
    aligned = {path: [["tt.divisibility", 16]] for path in pointers(tuple(arguments.values()))}
    source = compiler.ASTSource(step_leaves, signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": over.warps, "num_stages": 1, "enable_fp_fusion": True, "ptx_version": 87}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options), over


def pointers(tree, path=()):
    """The paths of all pointers in nested tuples of type names."""
    for i, x in enumerate(tree):
        if isinstance(x, tuple):
            yield from pointers(x, (*path, i))
        elif x.startswith("*"):
            yield (*path, i)


def assert_compiles(*args, capability=90, **kwargs):
    kernel, _ = lower(*args, capability=capability, **kwargs)
    assert f".target sm_{capability}" in kernel.asm["ptx"]
    assert kernel.asm["cubin"]


@pytest.mark.parametrize(
    ("codec", "how"),
    [(codec, how) for codec in EVERY_CODEC for how in EVERY_ROUNDING],
)
def test_every_codec_and_rounding_compiles(codec, how):
    assert_compiles(ADAMW, codec, how)


@pytest.mark.parametrize("codec", EVERY_CODEC)
@pytest.mark.parametrize("capability", [80, 100])
def test_every_codec_compiles_for_every_generation(capability, codec):
    assert_compiles(ADAMW, codec, capability=capability)


@pytest.mark.parametrize("opt", **named(opt for opt in OPTIMIZERS if opt is not ADAMW))
def test_every_rule_and_its_flags_compile(opt):
    assert_compiles(opt)


@pytest.mark.parametrize(
    ("codec", "how"), [*((codec, "stochastic") for codec in EVERY_CODEC[1:]), ("offset", "split24")]
)
@pytest.mark.parametrize("opt", **named(opt for opt in OPTIMIZERS if opt is not ADAMW))
def test_every_rule_codec_and_rounding_compiles(opt, codec, how):
    assert_compiles(opt, codec, how)


@pytest.mark.parametrize("codec", VARIANTS)
@pytest.mark.parametrize("opt", **named((ADAMW, LION)))
def test_every_dither_and_scale_compiles(opt, codec):
    assert_compiles(opt, codec)


@pytest.mark.parametrize("how", ROUNDINGS)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_parameters_of_8_bits_compile(capability, dtype, how):
    assert_compiles(ADAMW, "fp8", how, dtype=dtype, capability=capability)


@pytest.mark.parametrize("shapes", ["ragged", "unaligned", "several"])
def test_corrections_and_half_bytes_compile_in_every_tiling(shapes):
    assert_compiles(ADAMW, "four_bit", "kahan", shapes=SHAPES[shapes], delta=F32, scaled=True)
    assert_compiles(LION, "float32", "split24", grad=F32, shapes=SHAPES[shapes])


@pytest.mark.parametrize("delta", [None, BF16, F16, F32], ids=str)
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_every_dtype_compiles(dtype, delta):
    assert_compiles(LION, dtype=dtype, grad=F32, delta=delta)


@pytest.mark.parametrize("dtype", [F16, F32])
def test_every_dtype_compiles_with_rounding_to_nearest(dtype):
    assert_compiles(ADAMW, how="nearest", dtype=dtype)


@pytest.mark.parametrize("codec", ["offset", "float32"])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_every_tiling_compiles(shapes, codec):
    assert_compiles(LION, codec, shapes=shapes)


@pytest.mark.parametrize("inner", [8, 16], ids=["rows_in_runs", "rows_in_one_run"])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_pieces_of_leaves_compile(capability, inner):
    runs = [(inner, 64 if inner < 16 else 0)] * 2
    assert_compiles(ADAMW, shapes=((16, 512), (16, 768)), capability=capability, runs=runs)


COSTS = {  # registers and instructions a parameter of large leaves, as measured with Triton 3.9
    "adamw": ((ADAMW,), 126, 54.0),
    "lion": ((LION,), 90, 39.6),
    "dynamic": ((ADAMW, "dynamic"), 147, 114.1),  # Triton 3.6 takes 186 registers
    "companded": ((ADAMW, "companded"), 127, 54.6),
    "fp8": ((ADAMW, "fp8"), 127, 60.5),
    "four_bit": ((ADAMW, "four_bit"), 76, 63.4),
    "kahan": ((ADAMW, "offset", "kahan"), 131, 62.1),
    "split24": ((ADAMW, "offset", "split24"), 127, 62.0),
    "split32": ((ADAMW, "offset", "split32"), 168, 56.2),
    "e4m3_parameters": ((ADAMW, "offset", "stochastic", E4M3), 125, 67.9),
}


@pytest.mark.parametrize(("how", "registers", "executed"), COSTS.values(), ids=COSTS)
def test_kernel_cost(how, registers, executed, tmp_path):
    """Of large leaves; see `sass` for what counts."""
    if sass.disassembler() is None:
        pytest.skip("this Triton comes without cuobjdump")
    kernel, over = lower(*how, shapes=LARGE)
    blocks, tiles = (1, 8) if "four_bit" in how else (2, 4)
    assert (over.tiling.block, over.tiling.blocks, over.tiling.tiles, over.warps) == (256, blocks, tiles, 1)
    cost = sass.cost(kernel.asm["cubin"], tmp_path / "cubin")
    per_parameter = cost.loop * 32 * over.warps / (over.tiling.block * over.tiling.blocks)
    print(f"{cost}, {per_parameter:.2f} instructions a parameter")
    assert (cost.stack, cost.spills) == (0, 0)
    assert cost.registers <= registers + 6
    assert 0 < per_parameter <= 1.05 * executed


# A loop with two ways, of which the cold one is the longer, the first with a store by some threads; its exit is in its
# middle. Behind it is what a warp does that diverged, which jumps back, and the end.
HOT, COLD = ["FMUL R1, R1, R1"], ["FMUL R1, R1, R1"] * 4
PROGRAM = """
MOV R1, c[0x0][0x28] | BRA.DIV UR6, {diverged} | BSSY B0, {join} | @P0 BRA {second} | {first} | @P1 BRA {join}
STG.E desc[UR4][R2.64], R1 | BRA {join} | {other} | BSYNC B0 | @!P0 EXIT | BRA {head}
WARPSYNC.COLLECTIVE R50, {join} | BRA {after} | BRA {end}
"""


def assemble(first, other):
    """Lays PROGRAM out, 16 bytes an instruction, with two ways of that many instructions."""
    text = PROGRAM.replace("{first}", " | ".join(first)).replace("{other}", " | ".join(other))
    lines = [line.strip() for line in text.strip().replace("\n", " | ").split("|")]
    store, sync = lines.index("STG.E desc[UR4][R2.64], R1"), lines.index("BSYNC B0")
    places = {"head": 1, "after": 2, "second": store + 2, "join": sync, "diverged": sync + 3, "end": len(lines) - 1}
    places = {name: hex(16 * place) for name, place in places.items()}
    return "\n".join(f"  /*{16 * i:04x}*/  {line.format(**places)} ;  /* 0x0 */" for i, line in enumerate(lines))


@pytest.mark.parametrize(("first", "other"), [(HOT, COLD), (COLD, HOT)], ids=["hot_first", "cold_first"])
def test_a_loop_is_counted_without_its_cold_code(first, other):
    """BRA.DIV, BSSY, BRA, one FMUL, perhaps a BRA to the end of either way, BSYNC, EXIT, BRA."""
    assert sass.loop_length(sass.parse(assemble(first, other))) == (8 if first is HOT else 7)
