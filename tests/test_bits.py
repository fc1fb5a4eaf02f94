"""Random bits against Philox's published vectors and an oracle in 64-bit integers; the addressing, word by word."""

import hashlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from oracles import philox

from optax_sr8bit import bits, seeds

WORD = st.integers(0, philox.MASK)
EXTREMES = (0, 1, 0x7FFFFFFF, 0x80000000, philox.MASK)


def u32(x):
    return jnp.asarray(np.asarray(x, np.uint32))


def grid(rows, cols):
    return np.asarray(rows, np.uint32)[:, None], np.asarray(cols, np.uint32)[None, :]


def parameter_bits(words, rows, cols):
    row, col = np.broadcast_arrays(*grid(rows, cols))
    return np.asarray(jax.jit(bits.parameter_bits)(tuple(u32(w) for w in words), (u32(row), u32(col))))


@pytest.mark.parametrize(("rounds", "counter", "key", "expected"), philox.KNOWN_ANSWERS)
def test_known_answers(rounds, counter, key, expected):
    """Of the oracle; those of the library have no published vectors, for so many rounds."""
    assert tuple(int(w) for w in philox.philox4x32(counter, key, rounds)) == expected


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_philox_on_random_and_extreme_counters(jit):
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, 2**32, (6, 20000), dtype=np.uint32)
    corners = np.array(list(itertools.product(EXTREMES, repeat=6)), np.uint32).T
    for words in (drawn, corners):
        got = (jax.jit(bits.philox4x32) if jit else bits.philox4x32)(*words)
        want = philox.philox4x32(words[:4], words[4:])
        for g, w in zip(got, want, strict=True):
            np.testing.assert_array_equal(np.asarray(g, np.uint64), w)


@settings(max_examples=50, deadline=None)
@given(words=st.tuples(WORD, WORD, WORD, WORD, WORD), row=WORD, col=st.integers(0, philox.MASK - 40))
def test_parameter_bits_have_the_oracles_address(words, row, col):
    rows, cols = (np.arange(3) + row) % 2**32, np.arange(40) + col
    np.testing.assert_array_equal(parameter_bits(words, rows, cols), philox.parameter_bits(words, *grid(rows, cols)))


@pytest.mark.parametrize("words", [(1, 2, 3, 4, 5), (philox.MASK,) * 5, (0,) * 5], ids=["small", "ones", "zeros"])
def test_parameter_bits_do_not_depend_on_the_tile(words):
    whole = parameter_bits(words, np.arange(8), np.arange(64))
    assert whole.max() < 65536
    np.testing.assert_array_equal(whole, philox.parameter_bits(words, *grid(np.arange(8), np.arange(64))))
    for i, j in itertools.product(range(2), range(4)):
        # Tiles that start within a group of eight columns too.
        rows, cols = np.arange(4) + 4 * i, np.arange(13) + 13 * j
        np.testing.assert_array_equal(parameter_bits(words, rows, cols), whole[np.ix_(rows, cols)])


@pytest.mark.parametrize("source", ["parameter_bits", "weyl_mu", "weyl_nu", "philox_mu", "philox_nu"])
def test_leaves_steps_rows_seeds_and_moments_differ(source):
    """Every pair of addresses gives other words, nowhere near a shift of each other by chance."""
    fn = jax.jit(getattr(bits, source))
    row, col = np.broadcast_arrays(*grid(np.arange(4), np.arange(512)))
    leaves = [seeds.leaf_words(name) for name in ("a", "b", "a/b", "b/a", "layers/0/kernel", "layers/1/kernel")]
    streams = {}
    for (lo, hi), step, seed in itertools.product(leaves, (0, 1, 2, 1000), (0, 1)):
        words = (*np.asarray(seeds.seed_words(seed)), step, lo, hi)
        got = np.asarray(fn(tuple(u32(w) for w in words), (u32(row), u32(col))))
        for r in range(4):
            streams[lo, step, seed, r] = got[r]
    # 192 streams of 512 words; equal 16-bit words at one place have probability 2^-16, so on average 0.008 a pair.
    table = np.stack(list(streams.values()))
    worst = max(int((table[i] == table[i + 1 :]).sum(-1).max()) for i in range(len(table) - 1))
    assert worst <= 8
    assert len({row.tobytes() for row in table}) == len(streams)


def test_moments_and_parameter_share_no_bits():
    words = tuple(u32(w) for w in (1, 2, 3, 4, 5))
    row, col = (u32(x) for x in np.broadcast_arrays(*grid(np.arange(8), np.arange(512))))
    dithers = (bits.weyl_mu, bits.weyl_nu, bits.philox_mu, bits.philox_nu)
    tops = [np.asarray(dither(words, (row, col))) >> 16 for dither in dithers]
    tops.append(np.asarray(bits.parameter_bits(words, (row, col))))
    for a, b in itertools.combinations(tops, 2):
        # 4096 places, each equal with probability 2^-16.
        assert (a == b).sum() <= 4


@settings(max_examples=50, deadline=None)
@given(words=st.tuples(WORD, WORD, WORD, WORD, WORD), row=WORD, col=WORD)
def test_weyl_words_are_the_formula(words, row, col):
    arrays = tuple(u32(w) for w in words)
    assert int(bits.weyl_mu(arrays, (u32(row), u32(col)))) == philox.weyl_mu(words, row, col)
    assert int(bits.weyl_nu(arrays, (u32(row), u32(col)))) == philox.weyl_nu(words, row, col)


def test_half_code_is_half():
    got = bits.half_code((u32(1),) * 5, (u32([0, 7]), u32([3, 9])))
    assert np.asarray(got).tolist() == [0x80000000] * 2


# blake2s with an 8-byte digest, little-endian: the low word first. Literals, so that no release can move the noise.
LEAF_WORDS = {
    "": (0x788B2AEF, 0x9CDA80DD),
    "w": (0x5D9CFA5B, 0x87A766EB),
    "a/b/c": (0x50A5BEBA, 0x342540B4),
    "layers/0/kernel": (0x8BFB0191, 0x4EC993AD),
    "嵌入": (0x05DF1C75, 0x014EA8C0),
}


@pytest.mark.parametrize("path", LEAF_WORDS)
def test_leaf_words_are_stable(path):
    assert tuple(map(int, seeds.leaf_words(path))) == LEAF_WORDS[path]
    digest = int.from_bytes(hashlib.blake2s(path.encode(), digest_size=8).digest(), "little")
    assert LEAF_WORDS[path] == (digest & philox.MASK, digest >> 32)


INTEGERS = (0, 1, 2, -1, -2, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**63, 2**64, 2**64 + 1, 2**200, -(2**200))


def test_seed_words_of_integers_are_distinct():
    words = {seed: np.asarray(seeds.seed_words(seed)) for seed in INTEGERS}
    for w in words.values():
        assert w.dtype == np.uint32
        assert w.shape == (2,)
    assert len({w.tobytes() for w in words.values()}) == len(INTEGERS)


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint32, np.uint8])
def test_seed_words_of_numpy_integers_are_those_of_the_integer(kind):
    np.testing.assert_array_equal(seeds.seed_words(kind(42)), seeds.seed_words(42))


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_seed_words_of_keys(impl):
    """A typed key and its raw data are the same seed; keys that differ in any word give other seeds."""
    keys = [jax.random.key(i, impl=impl) for i in (0, 1, 2**31)]
    keys += list(jax.random.split(keys[0], 5))
    words = []
    for key in keys:
        typed, raw = np.asarray(seeds.seed_words(key)), np.asarray(seeds.seed_words(jax.random.key_data(key)))
        assert typed.dtype == np.uint32
        assert typed.shape == (2,)
        np.testing.assert_array_equal(typed, raw)
        words.append(typed.tobytes())
    assert len(set(words)) == len(keys)


def test_seed_words_accept_a_traced_key():
    key = jax.random.key(7)
    np.testing.assert_array_equal(jax.jit(seeds.seed_words)(key), seeds.seed_words(key))
