"""8-bit codes by exhaustion and brute force, against tables written from their definitions."""

import functools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tolerances
from moment_codes import ABSMAX, DITHERED, HALF, MOMENTS, decode, dithered, encode, moments, signed, values_of
from oracles import codes as oracle

from optax_sr8bit import codecs


@dithered
def test_codes_mean_what_the_definition_says(name):
    moment, code = DITHERED[name]
    got = jax.jit(moment.decode)(jnp.arange(256, dtype=jnp.uint32), jnp.ones(256, jnp.float32))
    np.testing.assert_array_equal(np.asarray(got, np.float64), code.units())
    assert moment.tiny == code.tiny
    assert code.units()[moment.zero] == (0 if code.offset else 1)
    largest = np.float32([1.0, 1e-20, 3e20])
    np.testing.assert_allclose(moment.scale(largest), largest.astype(np.float64) / code.top, rtol=tolerances.SCALE)


@moments
@pytest.mark.parametrize("absmax", ABSMAX)
def test_encode_after_decode_is_the_identity(name, absmax):
    code = np.arange(256)
    value = decode(name, code, absmax)
    assert np.isfinite(value).all()
    got = encode(name, value, absmax)
    if signed(name) and name in DITHERED:
        assert value[128] == 0  # -0.0, the one value with two codes
        assert got[128] in (0, 128)
        code, got = np.delete(code, 128), np.delete(got, 128)
    np.testing.assert_array_equal(got, code)


def million(name):
    """10^6 magnitudes of a block with absmax 1: logarithmic down to below the least code, uniform, and every tie."""
    rng = np.random.default_rng(0)
    table = np.unique(np.abs(values_of(name)))
    ties = ((table[1:] + table[:-1]) / 2).astype(np.float32)
    near = [np.nextafter(ties, np.float32(2)), ties, np.nextafter(ties, np.float32(0))]
    x = [2.0 ** rng.uniform(-36, 0, 600_000), rng.uniform(0, 1, 400_000 - 3 * len(ties)), *near]
    x = np.concatenate(x).astype(np.float32)
    return np.where(rng.random(x.size) < 0.5, -x, x) if signed(name) else x


@moments
def test_nearest_agrees_with_brute_force(name):
    """The code is the nearest of all 256, but for values so close to a tie that float32 arithmetic cannot tell.

    The bound is twice the float32 error of what is compared: y + 1 for the offset floats; for the dynamic maps, in the
    decade that ends at 10**d, a multiple of y + 0.8 10**d.
    """
    x, absmax = million(name), np.float32(0.7)
    values = values_of(name)
    x = x * absmax
    code = encode(name, x, absmax)
    misses = 0
    for part, chosen in zip(np.array_split(x, 1000), np.array_split(code, 1000), strict=True):
        y = part.astype(np.float64) / np.float64(absmax)
        if name in DITHERED:
            offset, error = DITHERED[name][1].offset / DITHERED[name][1].top, tolerances.ENCODE
        else:
            offset = 0.8 * 10.0 ** np.ceil(np.log10(np.abs(y).clip(1.01e-7)))
            error = tolerances.DYNAMIC
        excess = oracle.excess(y, chosen, values)
        assert (excess <= 2 * error * (np.abs(y) + offset)).all()
        misses += int((excess > 0).sum())
    # Ties and their neighbours are among the values on purpose: three for each of at most 256 codes.
    assert misses <= 3 * 256 + 1e-5 * x.size


def dither_sample(code, absmax):
    """About 120 magnitudes, float32: every scale, codes, their float32 neighbours, zero, absmax."""
    rng = np.random.default_rng(1)
    units = np.abs(code.units())[:: 9 if code.mantissa == 4 else 7]
    scaled = [2.0 ** rng.uniform(-30, np.log2(code.top), 60), rng.uniform(0, code.top, 20), units, units + 1e-3]
    scaled += [[0.0, 1e-12, 2.0**-24, 2.0**-23, 0.5, 1.0, code.top / 2, code.top]]
    return np.unique(np.minimum(np.concatenate(scaled) * (absmax / code.top), absmax).astype(np.float32))


@functools.cache
def code_counts(name):
    """x, absmax -> (the least code over all draws, how many draws give the next one); no draw may give a third."""
    moment, code = DITHERED[name]
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
    """absmax = top 2^k makes top/absmax a power of two: y + 1 is rounded once, and the mean of all draws is it."""
    code = DITHERED[name][1]
    absmax = np.float32(code.top * 2.0**exponent)
    x = dither_sample(code, float(absmax))
    y = x * np.float32(2.0**-exponent) + np.float32(code.offset)
    lower, ups = code_counts(name)(x, absmax)
    units = code.units()
    draws = 2**code.shift
    for value, low, up in zip(y, lower, ups, strict=True):
        if not code.offset and value < 1:  # the least code of a float without zero
            assert (low, up) == (0, 0)
            continue
        step = Fraction(units[low + 1]) - Fraction(units[low]) if up else Fraction(0)
        mean = Fraction(units[low]) + step * int(up) / draws
        assert mean == Fraction(float(value)) - code.offset, (name, float(value).hex())
    assert (ups > 0).sum() > 60


@dithered
@pytest.mark.parametrize("absmax", [0.7, 1e25])
def test_dither_of_any_absmax_is_unbiased_to_float32(name, absmax):
    code = DITHERED[name][1]
    absmax = np.float32(absmax)
    x = dither_sample(code, float(absmax))
    lower, ups = code_counts(name)(x, absmax)
    units = np.append(code.units(), 0.0)
    exact = x.astype(np.float64) / np.float64(absmax) * code.top
    mean = units[lower] + np.where(ups > 0, units[lower + 1] - units[lower], 0) * ups / 2**code.shift
    tested = exact >= 1 - code.offset
    bound = tolerances.ENCODE * (exact + code.offset)
    assert (np.abs(mean - exact) <= bound)[tested].all()
    if signed(name):
        flipped, flipped_ups = code_counts(name)(-x, absmax)
        np.testing.assert_array_equal(flipped, lower ^ 128)
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
    table = np.sort(values_of(name))
    largest = max(float(absmax), MOMENTS[name].tiny)
    if absmax >= MOMENTS[name].tiny:
        ends = np.searchsorted(table, y).clip(1, 255)
        half = (table[ends] - table[ends - 1]) / 2
        assert (np.abs(got / largest - y) <= half * (1 + 1e-5) + np.where(y < table[0], table[0] - y, 0)).all()
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
    assert (got == (moment.tiny / oracle.WIDE_NU.top if name == "offset_wide-nu" else 0)).all()


@moments
@pytest.mark.parametrize("word", [0, HALF, 0xFFFFFFFF])
@pytest.mark.parametrize("value", [1e-20, 0.3, 1.0, 7e20])
def test_constant_blocks_stay_constant(name, word, value):
    """absmax itself has a code, the last; a draw of zero may find y + 1 one rounding below it."""
    code = encode(name, np.full(256, value), value, word)
    last = 127 if name in DITHERED and signed(name) else 255
    spacing = values_of(name)[last] - values_of(name)[last - 1] if word == 0 and name in DITHERED else 0
    got = decode(name, code, value)
    np.testing.assert_allclose(got, np.float32(value), rtol=2 * tolerances.SCALE + spacing)
    assert len(set(code.tolist())) == 1


@pytest.mark.parametrize("name", ["offset-mu", "offset_wide-mu"])
def test_codes_of_opposite_values_mirror(name):
    rng = np.random.default_rng(3)
    x = np.concatenate([rng.standard_normal(100_000) * 10.0 ** rng.uniform(-6, 0, 100_000), [0.0, 1.0]]).clip(-1, 1)
    word = rng.integers(0, 2**32, x.size, dtype=np.uint32)
    code = encode(name, x, 1.0, word)
    np.testing.assert_array_equal(encode(name, -x, 1.0, word), code ^ 128)
    np.testing.assert_array_equal(decode(name, code ^ 128, 1.0), -decode(name, code, 1.0))


def test_floors():
    """Half the least code of `offset` lies under its second moment; the others have none."""
    scale = jnp.asarray([1.0, 2.0**-90, 1e20], jnp.float32)
    np.testing.assert_array_equal(codecs.get("offset").unsigned.floor(scale), scale / 32)
    for name in ("dynamic", "float32"):
        np.testing.assert_array_equal(codecs.get(name).unsigned.floor(scale), jnp.zeros(3))


def test_float32_is_no_quantisation():
    codec = codecs.get("float32")
    x = jnp.asarray(np.random.default_rng(4).standard_normal(256).astype(np.float32))
    for moment in (codec.signed, codec.unsigned):
        code = moment.encode(x, jnp.float32(1), jnp.uint32(0))
        np.testing.assert_array_equal(moment.decode(code, jnp.float32(1)), x)
    assert (codec.bits, codecs.get("offset").bits) == (32, 8)
