"""Codes by exhaustion and brute force, against tables written from their definitions."""

import functools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tolerances
from moment_codes import (
    ABSMAX,
    DITHERED,
    HALF,
    MOMENTS,
    ORACLES,
    compand,
    decode,
    defined,
    dithered,
    encode,
    expand,
    moments,
    signed,
    used,
    values_of,
)
from oracles import codes as oracle

from optax_sr8bit import codecs

# c / (254 - |c|), three roundings; what is squared or is a short float is exact.
VALUE = {"companded-mu": 3 * tolerances.ULP}
# The softsign is a ratio, a product, a sum, a reciprocal, a product, and a sum with 1/2; the quotient of roots is two
# roots, a reciprocal and a product; both then are multiplied and something is added.
COMPANDED = {"companded-mu": (8 * tolerances.ULP, 1), "companded-nu": (6 * tolerances.ULP, 0)}


@defined
def test_codes_mean_what_the_definition_says(name):
    moment, code = MOMENTS[name], ORACLES[name]
    codes = used(name)
    got = jax.jit(moment.decode)(jnp.asarray(codes, jnp.uint32), jnp.ones(codes.size, jnp.float32))
    np.testing.assert_allclose(np.asarray(got, np.float64), code.units()[codes], rtol=VALUE.get(name, 0), atol=0)
    assert (moment.top, moment.tiny) == (code.top, code.tiny)
    assert code.units()[moment.zero] == (1 if code.zero_free else 0)


@moments
@pytest.mark.parametrize("absmax", ABSMAX)
def test_encode_after_decode_is_the_identity(name, absmax):
    code = used(name)
    value = decode(name, code, absmax)
    assert np.isfinite(value).all()
    got = encode(name, value, absmax)
    negative = (values_of(name)[code] == 0) & (code != MOMENTS[name].zero)  # -0.0, the one value with two codes
    assert (value[negative] == 0).all()
    assert np.isin(got[negative], [MOMENTS[name].zero, *code[negative]]).all()
    np.testing.assert_array_equal(got[~negative], code[~negative])


def million(name):
    """10^6 magnitudes of a block with absmax 1: logarithmic down to below the least code, uniform, and every tie."""
    rng = np.random.default_rng(0)
    table = compand(name, np.unique(np.abs(values_of(name)[used(name)])))
    ties = expand(name, (table[1:] + table[:-1]) / 2).astype(np.float32)
    near = [np.nextafter(ties, np.float32(2)), ties, np.nextafter(ties, np.float32(0))]
    x = [2.0 ** rng.uniform(-36, 0, 600_000), rng.uniform(0, 1, 400_000 - 3 * len(ties)), *near]
    x = np.concatenate(x).astype(np.float32)
    return np.where(rng.random(x.size) < 0.5, -x, x) if signed(name) else x


@moments
def test_nearest_agrees_with_brute_force(name):
    """The code is the nearest of all, but for values so close to a tie that float32 arithmetic cannot tell.

    The bound is twice the float32 error of what is compared: y and the offset for floats; for the dynamic maps, in the
    decade that ends at 10**d, a multiple of y + 0.8 10**d.
    """
    x, absmax = million(name), np.float32(0.7)
    values = compand(name, values_of(name))
    x = x * absmax
    code = encode(name, x, absmax)
    misses = 0
    for part, chosen in zip(np.array_split(x, 1000), np.array_split(code, 1000), strict=True):
        y = compand(name, part.astype(np.float64) / np.float64(absmax))
        if name in COMPANDED:
            error, offset = COMPANDED[name]
        elif name in DITHERED:
            offset, error = DITHERED[name].offset / DITHERED[name].top, tolerances.ENCODE
        else:
            offset = 0.8 * 10.0 ** np.ceil(np.log10(np.abs(y).clip(1.01e-7)))
            error = tolerances.DYNAMIC
        excess = oracle.excess(y, chosen, values)
        assert (excess <= 2 * error * (np.abs(y) + offset)).all()
        misses += int((excess > 0).sum())
    # Ties and their neighbours are among the values on purpose: three for each of at most 256 codes.
    assert misses <= 3 * 256 + 1e-5 * x.size


def dither_sample(code, absmax):
    """Magnitudes, float32: of every scale, codes, their float32 neighbours, zero, absmax; about 2**27 / draws."""
    rng = np.random.default_rng(1)
    units = code.units()[: np.nanargmax(code.units()) + 1][:: {4: 9, 3: 7, 1: 3}[code.mantissa]]
    logarithms = rng.uniform(-30 if code.bits == 8 else 0, np.log2(code.top), 60 if code.bits == 8 else 12)
    scaled = [2.0**logarithms, rng.uniform(0, code.top, len(logarithms) // 3), units, units + 1e-3]
    scaled += [[0.0, 1e-12, 2.0**-24, 2.0**-23, 0.5, 1.0, code.top / 2, code.top]]
    return np.unique(np.minimum(np.concatenate(scaled) * (absmax / code.top), absmax).astype(np.float32))


@functools.cache
def code_counts(name):
    """x, absmax -> (the least code over all draws, how many draws give the next one); no draw may give a third."""
    moment, code = MOMENTS[name], DITHERED[name]
    draws = 2**code.shift

    @jax.jit
    def reduced(x, absmax):
        words = jnp.arange(draws, dtype=jnp.uint32) << (32 - code.shift)

        def one(value):
            values, largest = (jnp.broadcast_to(x, words.shape) for x in (value, absmax))
            got = moment.encode(values, largest, words)
            zero = np.uint32(0)
            operands = (got, got, ~got)  # the maximum of ~got is the minimum of got
            most = lambda a, b: (a[0] + b[0], jax.lax.max(a[1], b[1]), jax.lax.max(a[2], b[2]))  # noqa: E731
            return jax.lax.reduce(operands, (zero, zero, zero), most, (0,))

        return jax.lax.map(one, x)

    def counts(x, absmax):
        total, most, least = (np.asarray(r) for r in reduced(x, absmax))
        least = ~least
        assert (most - least <= 1).all()
        return least, total - least * np.uint32(draws)

    return counts


@dithered
@pytest.mark.parametrize("exponent", [-40, 25])
def test_dither_is_unbiased_exactly(name, exponent):
    """absmax = top 2^k makes top/absmax a power of two: float32 rounds only what it adds to, and the mean is that."""
    code = DITHERED[name]
    absmax = np.float32(code.top * 2.0**exponent)
    x = dither_sample(code, float(absmax))
    kept = code.kept(x * np.float32(2.0**-exponent))
    lower, ups = code_counts(name)(x, absmax)
    units = code.units()
    draws = 2**code.shift
    for value, low, up in zip(kept, lower, ups, strict=True):
        if code.zero_free and value < 1:
            assert (low, up) == (0, 0)
            continue
        step = Fraction(units[low + 1]) - Fraction(units[low]) if up else Fraction(0)
        mean = Fraction(units[low]) + step * int(up) / draws
        assert mean == Fraction(float(value)), (name, float(value).hex())
    assert (ups > 0).sum() > 0.4 * x.size


@dithered
@pytest.mark.parametrize("absmax", [0.7, 1e25])
def test_dither_of_any_absmax_is_unbiased_to_float32(name, absmax):
    code = DITHERED[name]
    absmax = np.float32(absmax)
    x = dither_sample(code, float(absmax))
    lower, ups = code_counts(name)(x, absmax)
    units = np.append(code.units(), 0.0)
    exact = x.astype(np.float64) / np.float64(absmax) * code.top
    mean = units[lower] + np.where(ups > 0, units[lower + 1] - units[lower], 0) * ups / 2**code.shift
    tested = exact >= (1 if code.zero_free else 0)
    bound = tolerances.ENCODE * (exact + code.offset)
    assert (np.abs(mean - exact) <= bound)[tested].all()
    if signed(name):
        flipped, flipped_ups = code_counts(name)(-x, absmax)
        np.testing.assert_array_equal(flipped, lower ^ code.sign)
        np.testing.assert_array_equal(flipped_ups, ups)


@moments
@pytest.mark.parametrize("absmax", ABSMAX)
def test_blocks_of_any_scale(name, absmax):
    """A block keeps its values to half a code from the least positive float32 to the largest, and its zeros."""
    rng = np.random.default_rng(2)
    absmax = np.float32(absmax)
    y = np.concatenate([[1.0, 0.0], rng.uniform(-1 if signed(name) else 0, 1, 254)])
    x = (y * np.float64(absmax)).astype(np.float32)
    got = decode(name, encode(name, x, absmax), absmax).astype(np.float64)
    assert np.isfinite(got).all()
    table = compand(name, np.sort(values_of(name)[used(name)]))
    largest = max(float(absmax), MOMENTS[name].tiny)
    if absmax >= MOMENTS[name].tiny:
        y = compand(name, y)
        ends = np.searchsorted(table, y).clip(1, table.size - 1)
        half = (table[ends] - table[ends - 1]) / 2
        assert (
            np.abs(compand(name, got / largest) - y) <= half * (1 + 1e-5) + np.where(y < table[0], table[0] - y, 0)
        ).all()
        np.testing.assert_allclose(got[0], absmax, rtol=2 * tolerances.SCALE)
    else:  # a block of nothing but dust keeps a value between zero and the clamp
        assert (np.abs(got) <= MOMENTS[name].tiny).all()


@moments
@pytest.mark.parametrize("word", [0, HALF, 0xFFFFFFFF])
def test_zero_blocks_stay_zero_for_every_draw(name, word):
    moment = MOMENTS[name]
    code = encode(name, np.zeros(256), 0.0, word)
    assert (code == moment.zero).all()
    got = decode(name, code, 0.0)
    assert (got == (np.float32(moment.tiny / moment.top) if name in ORACLES and ORACLES[name].zero_free else 0)).all()


@moments
@pytest.mark.parametrize("word", [0, HALF, 0xFFFFFFFF])
@pytest.mark.parametrize("value", [1e-20, 0.3, 1.0, 7e20])
def test_constant_blocks_stay_constant(name, word, value):
    """absmax itself has a code, the last; a draw of zero may find y + 1 one rounding below it."""
    code = encode(name, np.full(256, value), value, word)
    last = np.nanargmax(values_of(name))
    spacing = values_of(name)[last] - values_of(name)[last - 1] if word == 0 and name in DITHERED else 0
    got = decode(name, code, value)
    np.testing.assert_allclose(got, np.float32(value), rtol=2 * tolerances.SCALE + spacing)
    assert len(set(code.tolist())) == 1


@pytest.mark.parametrize("name", [name for name in ORACLES if signed(name)])
def test_codes_of_opposite_values_mirror(name):
    rng = np.random.default_rng(3)
    x = np.concatenate([rng.standard_normal(100_000) * 10.0 ** rng.uniform(-6, 0, 100_000), [0.0, 1.0]]).clip(-1, 1)
    word = rng.integers(0, 2**32, x.size, dtype=np.uint32)
    code = encode(name, x, 1.0, word)
    mirrored = code ^ DITHERED[name].sign if name in DITHERED else (256 - code) % 256
    np.testing.assert_array_equal(encode(name, -x, 1.0, word), mirrored)
    np.testing.assert_array_equal(decode(name, mirrored, 1.0), -decode(name, code, 1.0))


@pytest.mark.parametrize(
    ("codec", "divisor"),
    [("offset", 32), ("fp8", 1024), ("companded", 4), ("offset_wide", None), ("four_bit", None), ("dynamic", None)],
)
def test_floors(codec, divisor):
    """Half the least value but zero where it is rounded to a code; `dynamic` has none, others no zero."""
    moment = codecs.get(codec).unsigned
    scale = jnp.asarray([1.0, 2.0**-90, 1e20], jnp.float32)
    np.testing.assert_array_equal(moment.floor(scale), scale / divisor if divisor else jnp.zeros(3))
    if divisor:
        x = np.float32([1 - 1e-3, 1 + 1e-3]) / divisor
        np.testing.assert_array_equal(encode(f"{codec}-nu", x, moment.top), [0, 1])


def test_float32_is_no_quantisation():
    codec = codecs.get("float32")
    x = jnp.asarray(np.random.default_rng(4).standard_normal(256).astype(np.float32))
    for moment in (codec.signed, codec.unsigned):
        code = moment.encode(x, jnp.float32(1), jnp.uint32(0))
        np.testing.assert_array_equal(moment.decode(code, jnp.float32(1)), x)
    assert (codec.bits, codecs.get("offset").bits, codecs.get("four_bit").bits) == (32, 8, 4)
