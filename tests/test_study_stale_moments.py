"""Second moments in few bits on a small scale: who stalls, who stays right on average, whose updates are huge."""

import importlib
import json
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path[:0] = [str(EXAMPLES), str(EXAMPLES / "study")]
stale_moments = importlib.import_module("stale_moments")

pytestmark = pytest.mark.slow
STORES = ["sqrt_linear", "offset_nearest", "offset_weyl", "offset_philox"]
MODEL = {"text": "prose", "optimizer": "adamw", "width": 32, "layers": 1, "head": 32, "length": 16, "batch": 4}
MODEL |= {"steps": 50, "validation_batches": 1, "shape": "decaying", "end": 0.1, "tuned": 8e-3}
SETTINGS = {
    "stores": STORES,
    "average": {
        "b2s": [0.99],
        "cases": ["drop", "outlier"],
        "seeds": 2,
        "blocks": 8,
        "decades": 1.0,
        "kept": 4,
        "drop": 1e-3,
        "outlier": 10.0,
        "time_constants": 8,
        "expect": [
            {"store": ["offset_philox"], "what": "mean", "least": 0.85, "most": 1.15},
            {"store": ["sqrt_linear"], "what": "mean", "most": 1.15},
        ],
    },
    "trajectory": {"seeds": 1, "b2": 0.999, "warm": 20, "expect": []},
}


@pytest.fixture(scope="module")
def averages():
    """By (store, case)."""
    cells = [cell for cell in stale_moments.cells(SETTINGS) if cell["kind"] == "average"]
    return {(c["store"], c["case"]): stale_moments.measure(SETTINGS, c) for c in cells}


def test_offset_follows_a_drop_and_nearest_codes_do_not(averages):
    means = {store: averages[store, "drop"]["mean"] for store in STORES}
    assert 0.9 < means["offset_weyl"] < 1.05, means
    assert 0.93 < means["offset_philox"] < 1.07, means
    assert means["offset_nearest"] > 3, means
    assert means["sqrt_linear"] > 3, means


def test_zeros_need_a_floor(averages):
    """Either store rounds v to zero beside a momentum that is not; only `offset` has a floor under it."""
    assert averages["sqrt_linear", "outlier"]["largest"] > 10
    assert averages["offset_weyl", "outlier"]["zeros"] > 0.05
    assert averages["offset_weyl", "outlier"]["largest"] < 3


def test_expectations_are_judged(averages):
    assert averages["offset_philox", "drop"]["as_expected"] is True
    assert averages["sqrt_linear", "drop"]["as_expected"] is False
    assert averages["offset_nearest", "drop"]["as_expected"] is None


def test_results_are_json_and_repeat(averages):
    json.dumps(list(averages.values()), allow_nan=False)
    cell = {"kind": "average", "store": "offset_weyl", "case": "drop", "b2": 0.99}
    assert stale_moments.measure(SETTINGS, cell) == averages["offset_weyl", "drop"]


def test_round_trips():
    x = jnp.asarray([[1.0, 0.25, 1e-9, 0.0]], jnp.float32)
    assert np.allclose(stale_moments.root_linear(x, 255), [[1, 0.25, 0, 0]], rtol=0.01, atol=0)
    assert np.allclose(stale_moments.without_zero(x), [[1, 0.25, 3.25e-7, 3.25e-7]], rtol=0.02, atol=0)
    assert np.array_equal(stale_moments.bfloat16_nearest(x), x.astype(jnp.bfloat16).astype(jnp.float32))


def test_trajectories_of_recorded_gradients():
    settings = SETTINGS | {"trajectory": SETTINGS["trajectory"] | {"model": MODEL}}
    stores = ("offset_weyl", "sqrt_linear")
    cells = ({"kind": "trajectory", "store": store, "seed": 0} for store in stores)
    offset, zeros = (stale_moments.measure(settings, cell) for cell in cells)
    assert 0 < offset["direction"] < 0.1
    assert zeros["direction"] > 3 * offset["direction"]
    assert zeros["largest"] > 10 * zeros["largest_float32"] > 5 * offset["largest"]
    assert offset["root_nu"] == pytest.approx(1, abs=0.02)
