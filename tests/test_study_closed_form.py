"""The study's closed forms on a small scale: what must hold holds, and the controls fail."""

import importlib
import json
import math
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path[:0] = [str(EXAMPLES), str(EXAMPLES / "study")]
closed_form = importlib.import_module("closed_form")

ROUNDINGS = ["nearest", "stochastic", "float32"]
SETTINGS = {
    "elements": 4096,
    "standard_errors": 5,
    "accumulate": {
        "steps": 500,
        "control_steps": 100,
        "fractions": [1310],
        "roundings": [*ROUNDINGS, "kahan", "split24", "bits16"],
        "controls": ["frozen", "bits4"],
    },
    "decay": {"steps": 300, "rates": [1e-2], "roundings": ROUNDINGS},
    "dead_zone": {"products": [0.1], "time_constants": 15, "from": 1.9, "target": 1.25, "roundings": ROUNDINGS},
    "floor": {"rates": [1e-3], "curvature": 10.0, "noise": 1.0, "time_constants": 4, "roundings": ROUNDINGS[1:]},
}


@pytest.fixture(scope="module")
def results():
    """Of every cell, by (kind, rounding)."""
    cells = closed_form.cells(SETTINGS)
    return {(c["kind"], c["rounding"]): closed_form.measure(SETTINGS, c) for c in cells}


def test_every_cell_but_the_controls_is_within(results):
    for (kind, rounding), result in results.items():
        assert result["within"] == (rounding not in SETTINGS[kind].get("controls", [])), (kind, rounding, result)


def test_results_are_json_and_repeat(results):
    json.dumps(list(results.values()), allow_nan=False)
    cell = {"kind": "accumulate", "rounding": "stochastic", "at": 1310}
    assert closed_form.measure(SETTINGS, cell) == results["accumulate", "stochastic"]


def test_nearest_stays_and_stops(results):
    assert results["accumulate", "nearest"]["mean"] == 0
    assert results["decay", "nearest"]["mean"] == 1
    assert results["dead_zone", "nearest"]["mean"] > 10 * results["dead_zone", "stochastic"]["mean"]


def test_controls_fail_as_they_must(results):
    frozen, few = results["accumulate", "frozen"], results["accumulate", "bits4"]
    assert frozen["variance"] > 50 * frozen["expected_variance"]  # 100 steps with the same bits
    assert few["mean"] == pytest.approx(few["biased_mean"], rel=0.05)  # 1/16 a step, three times too much
    assert few["mean"] > 3 * few["expected_mean"]


def test_the_floor_of_stochastic_rounding_has_one_term(results):
    """Adding the noise of SGD to D E|g| / (2 h) counts it twice: 16 % too much at this rate."""
    floor = results["floor", "stochastic"]
    assert floor["expected"] == pytest.approx(floor["small_rate"], rel=1e-3)
    assert floor["sum"] > 1.15 * floor["small_rate"]
    assert floor["square"] > 5 * results["floor", "float32"]["square"]


def test_predicted_floor_meets_its_limits():
    """Small rates: D E|g| / (2 h). Large ones: the noise of SGD and uniform rounding errors, D**2 / (12 e h)."""
    small, limit, beyond = closed_form.noise_floor(1e-4, 1.0, 1.0)
    assert small == pytest.approx(limit, rel=1e-3)
    assert limit == pytest.approx(closed_form.SPACING * math.sqrt(2 / math.pi) / 2, rel=2e-3)
    assert beyond == 0
    large, _, beyond = closed_form.noise_floor(0.1, 1.0, 1.0)
    assert large == pytest.approx(0.01 / 0.19 + closed_form.SPACING**2 / 6 / 0.19, rel=1e-3)
    assert beyond > 0.9
