"""The `dynamic` codec against recordings of bitsandbytes."""

import jax.numpy as jnp
import numpy as np
import pytest
import tolerances
from moment_codes import DYNAMIC, GOLDEN, decode, encode, signed
from oracles import codes as oracle

# Decoded values beside the recorded ones: the roundings of three products and a constant, and those of the map.
DECODE = tolerances.DYNAMIC + tolerances.DYNAMIC_MAP


@pytest.mark.parametrize("name", DYNAMIC)
def test_dynamic_map_is_the_published_one(name):
    """To two float32 neighbours, half of them to the bit; the published one is three roundings from its definition."""
    recorded = np.load(GOLDEN)["signed.map" if signed(name) else "unsigned.map"]
    np.testing.assert_allclose(recorded, oracle.dynamic_map(signed(name)), rtol=tolerances.DYNAMIC_MAP)
    got = decode(name, np.arange(256), 1.0)
    distance = np.abs(got.view(np.int32) - recorded.view(np.int32))
    assert distance.max() <= 2
    assert (distance <= 1).mean() > 0.95
    np.testing.assert_array_equal(got[[DYNAMIC[name].zero, 255]].view(np.uint32), np.float32([0, 1]).view(np.uint32))
    for scale in (1.0, 0.7, 1e-20, 1e30):
        np.testing.assert_array_equal(encode(name, recorded * np.float32(scale), scale), np.arange(256))


@pytest.mark.parametrize("name", DYNAMIC)
@pytest.mark.parametrize("side", [-1, 1])
def test_every_boundary_is_where_the_nearest_value_changes(name, side):
    """All 255, from 32 float32 roundings on either side of them: halfway between values, and between decades."""
    recorded = np.load(GOLDEN)["signed.map" if signed(name) else "unsigned.map"].astype(np.float64)
    ties = (recorded[1:] + recorded[:-1]) / 2
    y = ties + side * np.abs(ties) * 32 * tolerances.ULP
    np.testing.assert_array_equal(encode(name, y, 1.0), np.arange(255) + (side > 0))


@pytest.mark.parametrize("name", DYNAMIC)
def test_codes_do_not_depend_on_compilation(name):
    """XLA may contract the lines' products and sums: codes change at boundaries at most, decoded values never."""
    moment, rng = DYNAMIC[name], np.random.default_rng(0)
    x = (rng.standard_normal((64, 256)) * 10.0 ** rng.uniform(-7, 0, (64, 256))).astype(np.float32)
    x = x if signed(name) else x**2
    absmax = np.abs(x).max(1, keepdims=True)
    code = moment.encode(jnp.asarray(x), jnp.asarray(absmax), None)
    np.testing.assert_array_equal(code, encode(name, x, absmax))
    value = np.asarray(moment.decode(code, jnp.asarray(absmax)))
    np.testing.assert_array_equal(value.view(np.uint32), decode(name, code, absmax).view(np.uint32))


# Where bitsandbytes' kernel does not give the nearest code, by (map, block): what it gives and why.
QUIRKS = {("signed", 3): (0, "an all-zero block: 0/0 takes code 0, -0.993, times absmax 0")}


@pytest.mark.parametrize("kind", ["signed", "unsigned"])
def test_dynamic_codes_are_bitsandbytes(kind):
    """Ten recorded blocks: normal, heavy tails, seven decades, zeros, one spike, constant, 1e-30, 1e30, half zeros."""
    golden = np.load(GOLDEN)
    name = "dynamic-mu" if kind == "signed" else "dynamic-nu"
    blocks = golden["blocks"] if kind == "signed" else np.abs(golden["blocks"])
    absmax = np.abs(blocks).max(1, keepdims=True)
    np.testing.assert_array_equal(absmax[:, 0], golden[f"{kind}.absmax"])
    code = encode(name, blocks, absmax)
    recorded = golden[f"{kind}.codes"].copy()
    for (map_name, block), (given, _) in QUIRKS.items():
        if map_name == kind:
            assert (recorded[block] == given).all()
            recorded[block] = DYNAMIC[name].zero
    np.testing.assert_array_equal(code, recorded)
    np.testing.assert_allclose(decode(name, code, absmax), golden[f"{kind}.dequant"], rtol=DECODE, atol=0)
