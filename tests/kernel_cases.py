"""The table of cases in which the Triton kernel must do what XLA does, and the leaves and gradients of a case."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tables import ADAMW, BF16, F16, F32, LION, OPTIMIZERS, RULES, Optimizer

from optax_sr8bit import codecs, hyperparameters, rounding
from optax_sr8bit.leaf import LeafSpec, step_group
from optax_sr8bit_kernels.launch import Launch
from optax_sr8bit_kernels.xla import packed

CODECS = ("offset", "offset_wide", "dynamic", "float32")  # of every optimizer; the others of AdamW and Lion
OTHERS = ("companded", "fp8", "four_bit")
ROUNDINGS = ("stochastic", "nearest")
CORRECTED = ("kahan", "split24", "split32")
EVERY_CODEC = {
    **{name: codecs.get(name) for name in (*CODECS, *OTHERS)},
    "offset_philox": codecs.Offset(dither="philox"),
    "offset_nearest": codecs.Offset(dither="nearest"),
    "offset_exponents": codecs.Offset(scales="power_of_two"),
    "four_bit_exponents": codecs.FourBit(scales="power_of_two"),
}
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
SEED = 0x9E3779B9
BAD = np.array([np.nan, np.inf, -np.inf, 2e19, -2e19], np.float32)  # the square of 2e19 is beyond float32


class Case(NamedTuple):
    """Leaves that one launch steps."""

    kind: str
    opt: Optimizer = ADAMW
    codec: str = "offset"
    how: str = "stochastic"
    dtype: Any = BF16
    grad: Any = BF16
    delta: Any = None
    block: int = 32
    shapes: tuple[tuple[int, ...], ...] = ((4, 64),)
    launches: tuple[Launch | None, ...] = (None,)
    steps: int = 2
    grads: str = "usual"  # a key of GRADIENTS
    cut: tuple[int, ...] = ()  # into how many pieces the only leaf is cut along each axis; the pieces are stepped
    scaled: bool = False

    @property
    def name(self) -> str:
        words = [self.kind, self.opt.name, self.codec, self.how]
        words += [jnp.dtype(d).name if d else "new" for d in (self.dtype, self.grad, self.delta)]
        shapes = ["x".join(map(str, s)) or "0d" for s in self.shapes[:3]]
        cut = ["cut", *map(str, self.cut)] if self.cut else []
        scaled = ["scaled"] * self.scaled
        return "-".join([*words, str(self.block), *shapes, self.grads, str(len(self.shapes)), *cut, *scaled])

    @property
    def spec(self) -> LeafSpec:
        rule, codec = self.opt().definition.rule, EVERY_CODEC[self.codec if self.opt.moments else "float32"]
        own = 0 if rule.measure is None else 1  # scalars of each leaf, which are given here: norms are XLA's
        rule = dataclasses.replace(rule, measure=None)
        block = min(self.block, self.shapes[0][-1]) if codec.blockwise else None
        how = rounding.get(self.how)
        dtypes = jnp.dtype(self.dtype), jnp.dtype(self.grad), self.delta
        return LeafSpec(rule, rule.flags, codec, how, block, *dtypes, self.scaled, own)


def usual(rng, shape):
    """Of all sizes about 1e-3."""
    return rng.standard_normal(shape) * 1e-3 * np.exp(rng.standard_normal(shape))


def wild(rng, shape):
    """Magnitudes from 1e-15 to 1e18, and blocks of zeros."""
    x = np.sign(rng.standard_normal(shape)) * 10.0 ** rng.uniform(-15, 18, shape)
    x[..., :300] = 0
    return x


def bad(rng, shape):
    """A few elements that are not finite, or whose squares are not."""
    return np.where(rng.uniform(size=shape) < 0.02, rng.choice(BAD, shape), usual(rng, shape))


GRADIENTS = {"usual": usual, "wild": wild, "bad": bad}
LAUNCHES = tuple(Launch(*how) for how in ((1, 1, 1), (1, 8, 1), (4, 4, 4), (2, 1, 1), (2, 2, 2)))
WHOLE, RAGGED, ODD = ((4, 64),), ((3, 44),), ((3, 45),)
MIXED = tuple(((2, 64), (3, 44), (33,), (1, 2, 50), (1, 96))[i % 5] for i in range(40))

PIECES = (
    (ADAMW, "offset", (8, 512), (2, 2), 64),
    (ADAMW, "offset", (2, 6, 128), (1, 3, 2), 32),  # rows in runs
    (LION, "offset_philox", (4, 3, 64), (4, 1, 2), 32),
    (LION, "offset", (3, 4, 64), (1, 4, 1), 32),  # one row a run
    (LION, "offset", (6, 44), (3, 1), 32),
    (ADAMW, "float32", (4, 48), (2, 2), 32),
    (LION, "offset", (512,), (4,), 64),
)


def pieces(case: Case, tree: Any) -> Any:
    """The pieces of each array of a tree, codes and scales too, as tuples in the place of the array."""

    def of(array):
        cut = [k if n % k == 0 else 1 for n, k in zip(array.shape, case.cut, strict=True)]  # an unused scale a row
        parts = [array]
        for axis, count in enumerate(cut):
            parts = [x for part in parts for x in np.split(part, count, axis)]
        if len(parts) < math.prod(case.cut):
            parts = [p for p in parts for _ in range(math.prod(case.cut) // len(parts))]
        return tuple(np.ascontiguousarray(part) for part in parts)

    return jax.tree.map(of, tree)


def is_cut(x: Any) -> bool:
    """Whether it is what `pieces` puts in the place of an array."""
    return isinstance(x, tuple) and bool(x) and isinstance(x[0], np.ndarray)


def cases() -> list[Case]:
    table = []
    for opt, codec, how in itertools.product(OPTIMIZERS, EVERY_CODEC, ROUNDINGS):
        if (opt not in RULES and codec not in CODECS) or codec in (*OTHERS, "four_bit_exponents"):
            continue  # dithers know nothing of the rule
        if opt not in RULES and codec != "offset" and how == "nearest":
            continue  # nor roundings of the codec
        table.append(Case("rule", opt, codec, how, shapes=WHOLE if how == "stochastic" else RAGGED))
    for opt, codec in itertools.product((ADAMW, LION), ("offset", "dynamic")):
        table.append(Case("ragged", opt, codec, grad=F32, shapes=RAGGED))
    for dtype, delta in itertools.product((BF16, F16, F32), (None, BF16, F16, F32)):
        table.append(Case("dtype", dtype=dtype, grad=F32 if dtype == delta else BF16, delta=delta))
    for dtype, delta in itertools.product((F16, F32), (None, F16)):
        table.append(Case("dtype", LION, how="nearest", dtype=dtype, delta=delta))
    for n, block in ((1, 8), (3, 8), (31, 128), (32, 32), (33, 128), (100, 128), (257, 256), (300, 256), (768, 1024)):
        table.append(Case("axis", LION if n % 2 else ADAMW, block=block, shapes=((3, n),)))
    for n in (1, 3, 31, 100, 257, 768):
        table.append(Case("axis", ADAMW if n % 2 else LION, "float32", shapes=((3, n),), grad=F32))
    for shape in ((), (1,), (7,)):
        table.append(Case("shape", ADAMW, "float32", shapes=(shape,)))
    for shape, block in (((1500,), 1024), ((2, 3, 300), 256), ((2, 768), 256), ((1, 2048), 1024)):
        table.append(Case("shape", LION, shapes=(shape,), block=block, dtype=F32))
    for shapes in (((2, 80), (1, 96)), ((2, 64), (1, 128))):
        ragged = shapes[0][1] == 80
        table.append(Case("launch", ADAMW if ragged else LION, shapes=shapes, launches=LAUNCHES, steps=1 + ragged))
    table.append(Case("launch", LION, "dynamic", shapes=((2, 80), (1, 96)), launches=LAUNCHES[1:3]))
    table.append(Case("launch", ADAMW, "float32", shapes=((2, 300), (1, 512)), launches=LAUNCHES[1:3]))
    for opt, count in ((ADAMW, 2), (ADAMW, 9), (LION, 40)):
        table.append(Case("group", opt, shapes=MIXED[:count], steps=1 + (count < 40)))
    table.append(Case("group", LION, "float32", "nearest", F32, F32, shapes=((1,),) * 140, steps=1))
    for opt, codec, shape, cut, block in PIECES:
        launches = (None, Launch(2, 2, 1)) if len(shape) > 1 else (None,)
        table.append(Case("pieces", opt, codec, shapes=(shape,), cut=cut, block=block, launches=launches))
    for (opt, codec), grads in itertools.product(itertools.product((ADAMW, LION), CODECS), ("wild", "bad")):
        table.append(
            Case(
                "gradient", opt, codec, block=256, shapes=((2, 700),), grads=grads, steps=3 if codec == "offset" else 2
            )
        )
    return table + other_codecs() + other_parameters()


def other_codecs() -> list[Case]:
    """Rows of an odd length end in half a byte of `four_bit`."""
    table = [Case("codec", ADAMW, codec, shapes=shapes) for codec in OTHERS for shapes in (WHOLE, ODD)]
    table += [Case("codec", LION, codec, scaled=True) for codec in OTHERS]
    table.append(Case("codec", ADAMW, "four_bit_exponents", shapes=ODD))
    table += [Case("codec", ADAMW, codec, block=256, shapes=((2, 300),), grads="bad", steps=1) for codec in OTHERS]
    table.append(Case("codec", ADAMW, "four_bit", shapes=((4, 128),), cut=(2, 2)))
    return table


def other_parameters() -> list[Case]:
    """Parameters with something beside them, and those of 8 bits."""
    table = [Case("kept", ADAMW, how=how, shapes=shapes) for how in CORRECTED for shapes in (WHOLE, ODD)]
    table.append(Case("kept", LION, "float32", "split24", grad=F32, shapes=MIXED[:2], scaled=True))
    table.append(Case("kept", ADAMW, how="split32", shapes=((4, 128),), cut=(2, 2)))
    table.append(Case("kept", LION, how="kahan", delta=F32, grads="bad", steps=1))
    for dtype in (E4M3, E5M2):
        table.append(Case("eight", ADAMW, how="stochastic", dtype=dtype, shapes=MIXED[:2]))
        table.append(Case("eight", LION, "float32", "nearest", dtype, F32, shapes=ODD, grads="wild"))
    return table


@functools.cache
def control(name: str, count: int, scaled: bool = False) -> np.ndarray:
    """The bits of an optimizer's scalars and of that of gradients, the words of a seed, the steps taken before."""
    definition = next(opt for opt in OPTIMIZERS if opt.name == name)().definition
    hyper = hyperparameters.evaluate(definition.hyperparameters, jnp.int32(count))
    scalars = [float(x) for x in definition.rule.scalars(hyper, jnp.int32(count))] + [0.7] * scaled
    return np.concatenate([np.array(scalars, np.float32).view(np.uint32), np.array([SEED, 77, count], np.uint32)])


def some_codes(rng, code, codec, shape):
    """Codes that may come out of an encoder: of finite values, and of none below zero where moments have no sign."""
    values = np.asarray(code.decode(jnp.arange(1 << min(codec.bits, 8), dtype=jnp.uint32), jnp.float32(1)))
    possible = np.flatnonzero(np.isfinite(values) & ((values >= 0) | (code is codec.signed))).astype(np.uint8)
    return np.asarray(packed(jnp.asarray(rng.choice(possible, shape)), codec.bits))


def leaves(case: Case):
    """Parameters, a state as if after many steps, and names of a case; NumPy arrays."""
    rng, spec = np.random.default_rng(zlib.crc32(case.name.encode())), case.spec
    params = tuple((rng.standard_normal(s) * 0.02).astype(case.dtype) for s in case.shapes)
    codes, scales = [], []
    for moment in spec.rule.moments:
        if spec.block is None:
            first = [(rng.standard_normal(s) * 1e-3).astype(np.float32) for s in case.shapes]
            codes.append(tuple(x if moment.signed else x * x for x in first))
            rows = [s[:-1] + (1,) if s else () for s in case.shapes]  # handed on
        else:
            code = spec.codec.code(moment.signed)
            codes.append(tuple(some_codes(rng, code, spec.codec, s) for s in case.shapes))
            rows = [(*s[:-1], -(-s[-1] // spec.block)) for s in case.shapes]
        size = 1e-3 if moment.signed else 1e-6
        some = [(size * np.exp(rng.standard_normal(s)) / 255).astype(np.float32) for s in rows]
        if spec.codec.power_of_two:
            some = [(x.view(np.uint32) >> 23).astype(np.uint8) for x in some]
        scales.append(tuple(some))
    if spec.corrected:
        codes.append(tuple(beside(rng, p, spec.rounding.correction) for p in params))
    names = rng.integers(0, 2**32, (len(case.shapes), 2), np.uint32)
    if spec.leaf_scalars:
        own = rng.uniform(0.5, 2, (len(case.shapes), spec.leaf_scalars)).astype(np.float32)
        names = np.concatenate([names, own.view(np.uint32)], axis=1)
    return params, tuple(codes), tuple(tuple(map(np.asarray, s)) for s in scales), names


def beside(rng, param, dtype):
    """What a rounding may keep beside parameters: any bits, or a number below half their spacing."""
    if jnp.issubdtype(dtype, jnp.floating):
        return (param.astype(np.float32) * rng.uniform(-(2**-9), 2**-9, param.shape)).astype(dtype)
    return rng.integers(0, 256 ** jnp.dtype(dtype).itemsize, param.shape).astype(dtype)


def steps(case: Case):
    """Per step (gradients, control)."""
    rng = np.random.default_rng(zlib.crc32(case.name.encode()) + 1)
    make = GRADIENTS[case.grads]
    with np.errstate(over="ignore", invalid="ignore"):
        grads = [tuple(np.asarray(make(rng, s)).astype(case.grad) for s in case.shapes) for _ in range(case.steps)]
    return [(g, control(case.opt.name, 3 + i, case.scaled)) for i, g in enumerate(grads)]


def step(case: Case, implementation: str, params, codes, scales, names, grads, word):
    """One step: (results, per moment codes, per moment scales). XLA goes leaf by leaf: one shape is compiled once."""
    if implementation == "triton":
        return step_group(params, grads, codes, scales, word, names, spec=case.spec, implementation=implementation)
    results, new_codes, new_scales = [], [], []
    for i in range(len(params)):
        one = tuple(m[i : i + 1] for m in codes), tuple(m[i : i + 1] for m in scales)
        r, c, s = step_group(
            params[i : i + 1], grads[i : i + 1], *one, word, names[i : i + 1], spec=case.spec, implementation="xla"
        )
        results += r
        new_codes.append([m[0] for m in c])
        new_scales.append([m[0] for m in s])
    return tuple(results), tuple(zip(*new_codes, strict=True)), tuple(zip(*new_scales, strict=True))


def history(case: Case):
    """Per step what XLA makes of the leaves, NumPy arrays."""
    params, codes, scales, names = leaves(case)
    taken = []
    for grads, word in steps(case):
        results, codes, scales = step(case, "xla", params, codes, scales, names, grads, word)
        params = results if case.delta is None else params
        taken.append(jax.tree.map(np.asarray, (results, codes, scales)))
    return taken
