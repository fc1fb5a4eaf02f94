"""How far the compiled kernel, which rounds some operations otherwise, may be from XLA after a step from one state."""

import jax
import jax.numpy as jnp
import numpy as np
from tables import F32, as_bits

# The kernel fuses multiply-adds and approximates square roots and reciprocals: a few units in the last place of
# float32, a few of the 2**16 or 2**19 values that random bits tell apart. Small leaves are too small for a share.
SHARE, SPARE = 1e-4, 2
SCALE_ULPS = 3
SCALE = 2**-23  # of the row's largest: where the terms of a block's only element nearly cancel, a rounding is many ulp
MOMENT = 1e-6  # of the row's largest
FLOAT32 = 2e-6  # of a float32 parameter and its step


def ordered(x) -> np.ndarray:
    """The bit patterns of floats as integers in the order of the floats: neighbours differ by one; both zeros are 0."""
    pattern = as_bits(x).astype(np.int64)
    half = 1 << (8 * np.asarray(x).dtype.itemsize - 1)
    return np.where(pattern >= half, half - pattern, pattern)


def ranks(code) -> np.ndarray:
    """By byte its place in the order of the values that a `MomentCode` decodes."""
    values = np.asarray(jax.jit(code.decode)(jnp.arange(256, dtype=jnp.uint32), jnp.ones(256, jnp.float32)))
    return np.unique(values, return_inverse=True)[1].reshape(-1)


def few(different) -> bool:
    return different.sum() <= SHARE * different.size + SPARE


def differences(spec, learning_rate, old, got, want) -> list[str]:
    """What is wrong with a leaf's (result, codes, scales), `got`, beside `want`; `old` is the parameter before."""
    wrong = []

    def claim(condition, what):
        if not condition:
            wrong.append(what)

    result, expected = np.asarray(got[0]), np.asarray(want[0])
    claim((result.dtype, result.shape) == (expected.dtype, expected.shape), "the result's dtype or shape")
    claim((np.isnan(result) == np.isnan(expected)).all(), "NaN elsewhere")
    a, b = (np.nan_to_num(x.astype(np.float64), posinf=1e39, neginf=-1e39) for x in (result, expected))
    size = np.abs(np.nan_to_num(np.asarray(old).astype(np.float64))) + np.abs(b)
    if spec.dtype == F32:
        claim(
            (np.abs(a - b) <= FLOAT32 * (size + learning_rate) + 2**-7 * np.abs(b) * (result.dtype != F32)).all(), "far"
        )
    else:
        differ = np.where(np.isnan(expected), False, ordered(result) != ordered(expected))
        claim(few(differ), f"{differ.sum()} of {differ.size} results")
        if spec.delta_dtype is None:
            far = np.abs(ordered(result) - ordered(expected)) > 1
            claim(not (far & differ).any(), "results that are no neighbours")
        else:
            claim((np.abs(a - b) <= 2**-6 * size).all(), "far differences")

    for moment, new, target in zip(spec.rule.moments, got[1], want[1], strict=True):
        new, target = np.asarray(new), np.asarray(target)
        if spec.block is None:
            largest = np.abs(target).max(-1, keepdims=True) if target.ndim else np.abs(target)
            claim((np.abs(new - target) <= MOMENT * largest).all(), f"{moment.name} far")
            continue
        claim(few(new != target), f"{(new != target).sum()} of {new.size} codes of {moment.name}")
        place = ranks(spec.codec.code(moment.signed))
        claim((np.abs(place[new] - place[target]) <= 1).all(), f"codes of {moment.name} off by more than one")
    for moment, new, target in zip(spec.rule.moments, got[2], want[2], strict=True):
        ulps = np.abs(ordered(new) - ordered(target))
        if spec.block is not None:
            target = np.asarray(target)
            ulps = np.where(np.abs(new - target) <= SCALE * target.max(-1, keepdims=True), 0, ulps)
        claim((ulps <= (SCALE_ULPS if spec.block else 0)).all(), f"scales of {moment.name}: {ulps.max(initial=0)} ulp")
    return wrong
