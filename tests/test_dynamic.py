"""The `dynamic` codec against recordings of bitsandbytes."""

from pathlib import Path

import numpy as np
import pytest
import tolerances
from moment_codes import DYNAMIC, decode, encode, signed
from oracles import codes as oracle

GOLDEN = Path(__file__).parent / "golden" / "bitsandbytes_quantize.npz"


@pytest.mark.parametrize("name", DYNAMIC)
def test_dynamic_map_is_the_published_one(name):
    moment = DYNAMIC[name]
    recorded = np.load(GOLDEN)["signed.map" if signed(name) else "unsigned.map"]
    np.testing.assert_array_equal(moment.table, recorded)
    np.testing.assert_allclose(recorded, oracle.dynamic_map(signed(name)), rtol=tolerances.DYNAMIC_MAP)
    assert moment.table[moment.zero] == 0


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
    np.testing.assert_array_equal(decode(name, code, absmax), golden[f"{kind}.dequant"])
