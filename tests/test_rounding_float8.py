"""Rounding to float8_e4m3fn and float8_e5m2: counts over all 65,536 draws, other libraries' casts, and a step."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from oracles import rounding as oracle
from tables import ADAMW, BF16, F32, LION, as_bits, assert_same_bits, grads_like, named, normal

from optax_sr8bit import rounding

FORMATS = {"float8_e4m3fn": oracle.E4M3, "float8_e5m2": oracle.E5M2}
CASTS = {name: np.dtype(getattr(ml_dtypes, name)) for name in FORMATS}
TOPS = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
ALL_DRAWS = np.arange(oracle.DRAWS, dtype=np.uint32)
SOME_DRAWS = np.array([0, 1, 0x1234, 0x7FFF, 0x8000, 0xABCD, 0xFFFE, 0xFFFF], np.uint32)
formats = pytest.mark.parametrize("name", FORMATS)


def encoder(how, name):
    return rounding.get(how).encoders[name]


def numbers(name):
    """All finite values that are not below zero, in order; their patterns are 0, 1, 2 ..."""
    values = np.arange(128, dtype=np.uint8).view(CASTS[name]).astype(np.float32)
    return values[np.isfinite(values)]


def sample(name):
    """Within the range: midpoints of codes and their neighbours, any fraction, any exponent; of both signs."""
    rng, codes = np.random.default_rng(0), numbers(name)
    middles = (codes[1:] + codes[:-1]) / 2
    between = codes[:-1] + np.diff(codes) * rng.uniform(size=(8, len(codes) - 1)).astype(np.float32)
    scales = 2.0 ** rng.uniform(-30, np.log2(TOPS[name]), 400)
    # Of the least value: fractions that are resolved, halfway so, and not.
    small = codes[1] * 2.0 ** -np.arange(1.0, 23)
    x = [middles, np.nextafter(middles, 0), np.nextafter(middles, codes[-1]), between.reshape(-1), scales, small]
    x = np.concatenate(x).astype(np.float32)
    return np.concatenate([x, -x])


@functools.cache
def count_draws(name):
    """(values, lower, upper) -> how many of all draws give each neighbour, 64 values at a time."""

    @jax.jit
    def counts(*columns):
        def one(args):
            value, low, high = args
            got = encoder("stochastic", name)(value[:, None], jnp.asarray(ALL_DRAWS)[None])
            return jnp.sum(got == low[:, None], 1), jnp.sum(got == high[:, None], 1)

        low, high = jax.lax.map(one, tuple(x.reshape(-1, 64) for x in columns))
        return low.reshape(-1), high.reshape(-1)

    return counts


def counted(name, x):
    """Both neighbours, and how many draws give them."""
    lower, upper, _ = oracle.neighbours(x, FORMATS[name])
    padded = (jnp.asarray(np.pad(a, (0, -len(x) % 64))) for a in (x, lower, upper))
    return lower, upper, *(np.asarray(n)[: len(x)] for n in count_draws(name)(*padded))


@formats
def test_counts_over_all_draws(name):
    """The fraction in 65,536ths; where a result is subnormal, of the fraction that a float32 in [1, 2) has room for."""
    x, fmt = sample(name), FORMATS[name]
    lower, upper, low, high = counted(name, x)
    ups, fraction = oracle.ups_of_short(x, fmt)
    moves = fraction > 0
    assert (lower != upper)[moves].all()
    assert (low + high)[moves].min() == oracle.DRAWS, "a draw gave neither neighbour"
    assert (low == oracle.DRAWS)[~moves].all()
    np.testing.assert_array_equal(high[moves], ups[moves])
    error = np.abs(high / oracle.DRAWS - fraction)[moves]
    subnormal = np.abs(x[moves]) < 2.0**fmt.emin
    assert error[~subnormal].max() <= 2.0**-17
    print(f"{name}: {error[~subnormal].max() * 2**17:.4f}, subnormal {error[subnormal].max() * 2**17:.4f} of 2^-17")
    assert error[subnormal].max() <= 2.0**-17 + 2.0 ** -(25 - fmt.precision)
    middles = (fraction == 0.5) & moves
    assert middles.sum() >= 2 * (len(numbers(name)) - 1)
    assert (high[middles] == oracle.DRAWS // 2).all()


@formats
def test_values_of_the_format_never_move(name):
    x = np.arange(256, dtype=np.uint8).view(CASTS[name]).astype(np.float32)
    patterns = np.arange(256)[np.isfinite(x)]
    x = x[np.isfinite(x), None]
    for how in ("stochastic", "nearest"):
        got = np.asarray(jax.jit(encoder(how, name))(jnp.asarray(x), jnp.asarray(ALL_DRAWS)[None]))
        assert (got == patterns[:, None]).all()


@formats
@pytest.mark.parametrize("how", ["stochastic", "nearest"])
def test_special_values_for_all_draws(name, how):
    """The 8-bit float without infinity saturates at ±448, in between and far beyond, and knows NaN alone."""
    top = np.float32(TOPS[name])
    values = [0.0, top, np.inf, np.nan, 3.4e38]
    if name == "float8_e4m3fn":
        values += [np.nextafter(top, np.inf, dtype=np.float32), 463.9, 464.0, 479.0, 480.0, 1e9]
        expected = [0, 0x7E, 0x7F, 0x7F, *[0x7E] * 7]
    else:
        values += [65536.0, 1e9]
        expected = [0, 0x7B, 0x7C, 0x7E, *[0x7C] * 3]
    x = np.array(values, np.float32).view(np.uint32)
    x = np.concatenate([x, x | np.uint32(0x80000000)])
    # Quiet and signalling NaN with payloads that would carry.
    x = np.concatenate([x, np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF800001], np.uint32)])
    expected = [*expected, *(e | 0x80 for e in expected), *(np.array([0, 0x80, 0, 0x80]) | expected[3])]
    floats = jax.lax.bitcast_convert_type(jnp.asarray(x), F32)
    got = np.asarray(jax.jit(encoder(how, name))(floats[:, None], jnp.asarray(ALL_DRAWS)[None]))
    assert (got == np.array(expected)[:, None]).all()


def test_above_the_largest_e5m2_is_infinity():
    """Which counts as 65,536."""
    x = np.array([57345.0, 59392.0, 61440.0, 65535.0], np.float32)
    lower, upper, low, high = counted("float8_e5m2", np.concatenate([x, -x]))
    assert (lower & 0x7F == 0x7B).all()
    assert (upper & 0x7F == 0x7C).all()
    assert high.tolist() == 2 * [8, 16384, 32768, 65528]
    assert (low + high == oracle.DRAWS).all()


@formats
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_nearest_is_the_cast_of_others(name, jit):
    """All bfloat16s, midpoints and their neighbours, and any float32s; beyond the range e4m3 saturates."""
    rng, top = np.random.default_rng(1), TOPS[name]
    halves = (np.arange(65536, dtype=np.uint32) << 16).view(np.float32)
    halves = halves[np.isfinite(halves)]
    x = np.concatenate([halves, sample(name), rng.uniform(-top, top, 10**5), rng.standard_normal(10**5) * 2.0**-8])
    x = x.astype(np.float32)
    fn = jax.jit(encoder("nearest", name)) if jit else encoder("nearest", name)
    got = np.asarray(fn(jnp.asarray(x), jnp.full(x.shape, 0xFFFF, jnp.uint32)))
    np.testing.assert_array_equal(got, oracle.nearest(x, FORMATS[name]))
    with np.errstate(over="ignore"):
        cast = np.clip(x, -448, 448) if name == "float8_e4m3fn" else x
        np.testing.assert_array_equal(got, cast.astype(CASTS[name]).view(np.uint8))


@formats
def test_a_step_moves_parameters_by_the_update_on_average(name):
    """Lion's first step is p - lr, a sixteenth of a spacing: at a power of two, above it, among subnormals."""
    least, unit = float(numbers(name)[1]), 2.0 ** (1 - FORMATS[name].precision)
    n = 1 << 16
    for size, spacing in ((1.0, unit), (1.25, unit), (2 * least, least)):
        params = jnp.full((n // 256, 256), -size, CASTS[name])
        grads = jnp.ones(params.shape, BF16)
        for how, f in (("stochastic", 1 / 16), ("nearest", 0.0)):
            tx = LION(spacing / 16, weight_decay=0.0, rounding=how)
            new, _ = tx.step(grads, tx.init(params), params)
            assert new.dtype == CASTS[name]
            moved = (np.asarray(new, np.float64) + size) / spacing
            assert set(np.unique(moved)) == ({-1.0, 0.0} if f else {0.0})
            assert abs(moved.mean() + f) <= 5 * (f * (1 - f) / n) ** 0.5


def some(dtype):
    return {"w": normal((16, 300), 0, 1.0, dtype), "b": normal((40,), 1, 1.0, dtype), "norm": normal((40,), 2, 1.0)}


@formats
@pytest.mark.parametrize("opt", **named((ADAMW, LION)))
def test_doors(name, opt):
    """There is no adding to an 8-bit float; the door that hands over the parameter itself does as `step` does."""
    params = some(CASTS[name])
    grads = grads_like(params, 0, dtype=BF16)
    tx, there = opt(0.1), opt(0.1, in_place=True)
    state = tx.init(params)
    desired = tx.step(grads, state, params)
    assert (as_bits(desired[0]["w"]) != as_bits(params["w"])).mean() > 0.1
    with pytest.raises(ValueError, match=rf"8-bit parameters.*step.*in_place=True.*b: {name}; w: {name}"):
        tx.update(grads, state, params)

    def through_updates(grads, state, params):
        updates, state = there.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    assert_same_bits(through_updates(grads, state, params), desired)
    assert_same_bits(jax.jit(through_updates)(grads, state, params), desired)
    assert_same_bits(jax.jit(tx.step)(grads, state, params), desired)


@formats
def test_gradients_of_8_bits_are_stepped_too(name):
    params = some(CASTS[name])
    grads, tx = grads_like(params, 0, 1.0), ADAMW(0.1)
    wide = jax.tree.map(lambda g: g.astype(F32), grads)
    assert_same_bits(tx.step(grads, tx.init(params), params), tx.step(wide, tx.init(params), params))
