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
# A parameter with something beside it: the spacing of what is kept, of the parameter, by which a rounding may turn.
RESOLVED = {"split32": 0.0, "split24": 2**-15, "kahan": 2**-16}


def ordered(x) -> np.ndarray:
    """The bit patterns of floats as integers in the order of the floats: neighbours differ by one; both zeros are 0."""
    pattern = as_bits(x).astype(np.int64)
    half = 1 << (8 * np.asarray(x).dtype.itemsize - 1)
    return np.where(pattern >= half, half - pattern, pattern)


def halves(code) -> np.ndarray:
    """The two codes of 4 bits in each byte."""
    return np.stack([code & 15, code >> 4], axis=-1)


def ranks(code, size=8) -> np.ndarray:
    """By code of so many bits its place in the order of the values that a `MomentCode` decodes."""
    patterns = jnp.arange(1 << size, dtype=jnp.uint32)
    values = np.asarray(jax.jit(code.decode)(patterns, jnp.ones(patterns.shape, jnp.float32)))
    return np.unique(values, return_inverse=True)[1].reshape(-1)


def few(different) -> bool:
    return different.sum() <= SHARE * different.size + SPARE


def joined(spec, stored, kept) -> np.ndarray:
    """What the optimizer takes a parameter to be that is stored with something beside it, float64."""
    patterns = (jnp.asarray(as_bits(x).astype(np.uint32)) for x in (stored, kept))
    return np.asarray(jax.jit(spec.rounding.join)(*patterns)).astype(np.float64)


def differences(spec, learning_rate, old, got, want) -> list[str]:
    """What is wrong with a leaf's (result, codes, scales), `got`, beside `want`; `old` is the parameter before.

    Where something is kept beside the parameter, it stands behind the codes.
    """
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
            # Beside zero, where the step cancels the parameter, numbers lie closer than float32 resolves the step.
            far = (np.abs(ordered(result) - ordered(expected)) > 1) & (np.abs(a - b) > FLOAT32 * (size + learning_rate))
            claim(not (far & differ).any(), "results that are no neighbours")
        else:
            claim((np.abs(a - b) <= 2**-6 * size).all(), "far differences")

    if spec.corrected and spec.delta_dtype is None:
        a, b = (np.nan_to_num(joined(spec, x[0], x[1][-1]), posinf=1e39, neginf=-1e39) for x in (got, want))
        bound = FLOAT32 * (size + learning_rate) + RESOLVED[spec.rounding.name] * np.abs(b)
        claim((np.abs(a - b) <= bound).all(), "far with what is kept")
    moments = len(spec.rule.moments)
    claim(len(got[1]) == len(want[1]) == moments + spec.corrected, "what is kept")
    for moment, new, target in zip(spec.rule.moments, got[1][:moments], want[1][:moments], strict=True):
        new, target = np.asarray(new), np.asarray(target)
        if spec.block is None:
            largest = np.abs(target).max(-1, keepdims=True) if target.ndim else np.abs(target)
            claim((np.abs(new - target) <= MOMENT * largest).all(), f"{moment.name} far")
            continue
        if spec.codec.bits == 4:
            new, target = halves(new), halves(target)
        claim(few(new != target), f"{(new != target).sum()} of {new.size} codes of {moment.name}")
        place = ranks(spec.codec.code(moment.signed), spec.codec.bits)
        claim((np.abs(place[new] - place[target]) <= 1).all(), f"codes of {moment.name} off by more than one")
    for moment, new, target in zip(spec.rule.moments, got[2], want[2], strict=True):
        ulps = np.abs(ordered(new) - ordered(target))
        if spec.block is not None:
            target = np.asarray(target)
            ulps = np.where(np.abs(new - target) <= SCALE * target.max(-1, keepdims=True), 0, ulps)
        claim((ulps <= (SCALE_ULPS if spec.block else 0)).all(), f"scales of {moment.name}: {ulps.max(initial=0)} ulp")
    return wrong
