"""Rounding to BF16 and F16 by exhaustion: an expectation becomes a count over all 65,536 draws."""

import functools
from fractions import Fraction

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from oracles import rounding as oracle

from optax_sr8bit import rounding

FORMATS = {"bfloat16": oracle.BFLOAT16, "float16": oracle.FLOAT16}
CASTS = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
ALL_DRAWS = np.arange(oracle.DRAWS, dtype=np.uint32)
SOME_DRAWS = np.array([0, 1, 2, 0x1234, 0x7FFF, 0x8000, 0xABCD, 0xFFFE, 0xFFFF], np.uint32)
ALL_PATTERNS = np.arange(65536, dtype=np.uint32)
formats = pytest.mark.parametrize("name", FORMATS)


def floats(patterns):
    return np.asarray(patterns, np.uint32).view(np.float32)


def stochastic(name):
    return rounding.get("stochastic").encoders[name]


def nearest(name):
    return rounding.get("nearest").encoders[name]


def representable(name):
    """Every value of the format, as float32, with its pattern: NaN excepted, ±0 and ±Inf included."""
    values = ALL_PATTERNS.astype(np.uint16).view(CASTS[name]).astype(np.float32)
    keep = ~np.isnan(values)
    return values[keep], ALL_PATTERNS[keep]


def signed(patterns):
    patterns = np.unique(np.asarray(patterns, np.uint32))
    return np.concatenate([patterns, patterns | np.uint32(0x80000000)])


def sample(name):
    """Float32 values of every exponent and sign, subnormals, neighbours of powers of two, the format's extremes."""
    rng = np.random.default_rng(0)
    exponents = np.arange(255, dtype=np.uint32) << 23
    patterns = [exponents + m for m in (0, 1, 0x7FFFFF, 0x800000 - 0x10000, 0x8000, 0x2AAAAA)]
    patterns.append(exponents + rng.integers(0, 2**23, 255, dtype=np.uint32))
    patterns.append(np.uint32(1) << np.arange(23, dtype=np.uint32))
    # 65504, 65536, 2^-14, 2^-24, 2^-25, 2^-40.
    powers = (0x477FE000, 0x47800000, 0x38800000, 0x33800000, 0x33000000, 0x2B800000)
    edges = {
        "bfloat16": [0x7F7F0000, 0x7F7F0001, 0x7F7F8000, 0x7F7FFFFF, 0x00800000, 0x007FFFFF, 0x00010000, 0x0000FFFF],
        "float16": [p + d for p in powers for d in (-1, 0, 1)],
    }[name]
    if name == "float16":
        # Dense in the formats' common range, subnormals of float16 above all.
        patterns.append(rng.integers(0x33000000, 0x47800000, 500, dtype=np.uint32))
        patterns.append(rng.integers(0x33000000, 0x38900000, 500, dtype=np.uint32))
    patterns.append(np.asarray(edges, np.uint32))
    patterns = np.concatenate(patterns)
    return floats(signed(patterns[patterns < 0x7F800000]))


@functools.cache
def count_draws(name):
    """(values, lower, upper) -> how many of all draws give each neighbour; compiled once, 64 values at a time."""

    @jax.jit
    def counts(x, lower, upper):
        def one(args):
            value, low, high = args
            got = stochastic(name)(value[:, None], jnp.asarray(ALL_DRAWS)[None])
            return jnp.sum(got == low[:, None], 1), jnp.sum(got == high[:, None], 1)

        shape = (-1, 64)
        low, high = jax.lax.map(one, (x.reshape(shape), lower.reshape(shape), upper.reshape(shape)))
        return low.reshape(-1), high.reshape(-1)

    return counts


def counted(name, x):
    lower, upper, ups = oracle.neighbours(x, FORMATS[name])
    pad = (0, -len(x) % 64)
    low, high = count_draws(name)(*(jnp.asarray(np.pad(a, pad)) for a in (x, lower, upper)))
    return lower, upper, ups, np.asarray(low)[: len(x)], np.asarray(high)[: len(x)]


@formats
def test_expectation_over_all_draws_is_exact(name):
    x = sample(name)
    fmt = FORMATS[name]
    lower, upper, ups, low, high = counted(name, x)
    moves = lower != upper
    assert (low[moves] + high[moves] == oracle.DRAWS).all(), "a draw gave neither neighbour"
    assert (low[~moves] == oracle.DRAWS).all(), "a representable value moved"
    np.testing.assert_array_equal(np.where(moves, high, 0), ups)
    limit = oracle.value(fmt.infinity, fmt)
    exact = 0
    for value, below, above, n in zip(x[moves], lower[moves], upper[moves], high[moves], strict=True):
        total = oracle.value(below, fmt) * (oracle.DRAWS - int(n)) + oracle.value(above, fmt) * int(n)
        error = abs(Fraction(float(value)) * oracle.DRAWS - total)
        if name == "float16" and abs(value) < 2.0**-14:
            # 65,536 draws resolve a spacing of 2^-24 down to 2^-40; what lies below is cut.
            assert error < oracle.DRAWS * Fraction(2) ** -40
            assert error == 0 or (Fraction(float(value)) * 2**40).denominator > 1
        else:
            assert abs(Fraction(float(value))) < limit
            assert error == 0, float(value).hex()
        exact += error == 0
    assert exact > 1000


@formats
def test_above_the_largest_value_is_infinity(name):
    """Between the largest value and 2**(emax + 1) the upper neighbour is Inf; from there on every draw gives Inf."""
    fmt = FORMATS[name]
    top = 2.0 ** (fmt.emax + 1)
    largest = np.float32(float(oracle.value(fmt.infinity - 1, fmt)))
    between = floats(largest.view(np.uint32) + np.array([1, 2, 999, 0x1000, 0x1FFF], np.uint32))
    lower, upper, ups, low, high = counted(name, np.concatenate([between, -between]))
    assert (lower & 0x7FFF == fmt.infinity - 1).all()
    assert (upper & 0x7FFF == fmt.infinity).all()
    np.testing.assert_array_equal(high, ups)
    np.testing.assert_array_equal(low, oracle.DRAWS - ups)
    beyond = np.array([v for v in (top, 1.5 * top, 3.4e38) if top <= v < 2.0**128], np.float32)
    got = jax.jit(stochastic(name))(beyond[:, None], SOME_DRAWS[None])
    assert (np.asarray(got) == fmt.infinity).all()
    got = jax.jit(stochastic(name))(-beyond[:, None], SOME_DRAWS[None])
    assert (np.asarray(got) == fmt.infinity + 0x8000).all()


@formats
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_every_draw_is_the_oracles(name, jit):
    x = sample(name)[:, None]
    fn = jax.jit(stochastic(name)) if jit else stochastic(name)
    draws = np.concatenate([SOME_DRAWS, np.random.default_rng(1).integers(0, 65536, 50, dtype=np.uint32)])[None]
    np.testing.assert_array_equal(fn(jnp.asarray(x), jnp.asarray(draws)), oracle.stochastic(x, draws, FORMATS[name]))


@formats
def test_representable_values_never_move(name):
    values, patterns = representable(name)
    draws = np.concatenate([SOME_DRAWS, np.random.default_rng(2).integers(0, 65536, 40, dtype=np.uint32)])
    got = jax.jit(stochastic(name))(jnp.asarray(values)[:, None], jnp.asarray(draws)[None])
    assert (np.asarray(got) == patterns[:, None]).all()
    got = jax.jit(nearest(name))(jnp.asarray(values), jnp.zeros(values.shape, jnp.uint32))
    np.testing.assert_array_equal(got, patterns)


@formats
def test_special_values_for_all_draws(name):
    fmt = FORMATS[name]
    largest = np.float32(float(oracle.value(fmt.infinity - 1, fmt)))
    values = np.array([0.0, -0.0, np.inf, -np.inf, largest, -largest], np.float32)
    expected = [0, 0x8000, fmt.infinity, fmt.infinity + 0x8000, fmt.infinity - 1, fmt.infinity + 0x7FFF]
    for fn in (stochastic(name), nearest(name)):
        got = np.asarray(jax.jit(fn)(jnp.asarray(values)[:, None], jnp.asarray(ALL_DRAWS)[None]))
        assert (got == np.array(expected)[:, None]).all()


@formats
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_nan_stays_nan_for_all_draws(name, jit):
    """Payloads that would carry into -0.0 or vanish into Inf, quiet and signalling, in bits all the way."""
    payloads = [0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF800001, 0x7FC00000, 0xFFC00000, 0x7F80FFFF, 0x7FBFFFFF]
    patterns = jnp.asarray(np.array([*payloads, 0x7FFF0000], np.uint32))
    for rule in (stochastic(name), nearest(name)):

        def fn(p, r, rule=rule):
            return rule(jax.lax.bitcast_convert_type(p, jnp.float32), r)

        got = np.asarray((jax.jit(fn) if jit else fn)(patterns[:, None], jnp.asarray(ALL_DRAWS)[None]))
        assert (got < 65536).all()
        assert np.isnan(got.astype(np.uint16).view(CASTS[name]).astype(np.float32)).all()


@formats
def test_subnormals_are_rounded_not_flushed(name):
    fmt = FORMATS[name]
    least = float(oracle.value(1, fmt))
    x = np.float32(least) * np.array([0.25, 0.5, 0.75, 1.25, 3.5, -0.25], np.float32)
    if name == "bfloat16":  # float32 subnormals: built from bits, since arithmetic may flush them
        x = floats(np.array([0x4000, 0x8000, 0xC000, 0x14000, 0x38000, 0x80004000], np.uint32))
    lower, upper, _, low, high = counted(name, x)
    assert (lower & 0x7FFF).tolist() == [0, 0, 0, 1, 3, 0]
    assert (upper & 0x7FFF).tolist() == [1, 1, 1, 2, 4, 1]
    assert (high * 4 // oracle.DRAWS).tolist() == [1, 2, 3, 1, 2, 1]
    assert (low + high == oracle.DRAWS).all()


@formats
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_nearest_is_ties_to_even(name, jit):
    """All upper halves with lower halves on and around every tie, against the oracle and other libraries' casts."""
    halves = [0, 1, 0x0FFF, 0x1000, 0x1001, 0x1FFF, 0x2FFF, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xF000, 0xFFFF]
    fn = jax.jit(nearest(name)) if jit else nearest(name)
    for half in halves if jit else halves[::4]:
        x = floats((ALL_PATTERNS << 16) | np.uint32(half))
        x = x[np.isfinite(x)]
        got = np.asarray(fn(jnp.asarray(x), jnp.full(x.shape, 0xFFFF, jnp.uint32)))
        np.testing.assert_array_equal(got, oracle.nearest(x, FORMATS[name]))
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(got, x.astype(CASTS[name]).view(np.uint16))


@formats
def test_compilers_cannot_fold_the_rounding_away(name):
    """Rounded and widened again inside one program: the value has changed, and is what eager steps give."""
    dtype = jnp.dtype(CASTS[name])
    x = jnp.asarray(np.random.default_rng(3).standard_normal(4096).astype(np.float32))
    r = jnp.asarray(np.random.default_rng(4).integers(0, 65536, 4096, dtype=np.uint32))

    def there_and_back(x, r, rule):
        narrow = jax.lax.bitcast_convert_type(rule(x, r).astype(jnp.uint16), dtype)
        return narrow.astype(jnp.float32)

    up = jax.jit(functools.partial(there_and_back, rule=stochastic(name)))(x, r)
    near = jax.jit(functools.partial(there_and_back, rule=nearest(name)))(x, r)
    np.testing.assert_array_equal(up, there_and_back(x, r, stochastic(name)))
    assert (np.asarray(up) != np.asarray(x)).mean() > 0.99
    # Half of all draws round away from the nearest on average over the fractions: 25 % of the results differ.
    assert 0.2 < (np.asarray(up) != np.asarray(near)).mean() < 0.3
