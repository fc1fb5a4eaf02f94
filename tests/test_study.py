"""The study's runs on a small scale: arms, probes, what repeats, records that go on, and the registration itself."""

import itertools
import json
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "study"))
import momentum
import optax_sr8bit as sr8
import probes
import records
import registration
import run
import runs
from arms import FROM_FLOAT32, MOMENTS, Arm

pytestmark = pytest.mark.slow

DIGITS = dict(
    model="digits", optimizer="adamw", width=64, batch=16, steps=20, shape="decaying", end=0.1, tuned=1e-3, probes=2
)
DIGITS |= {"follow": "all"}


@pytest.fixture(scope="module")
def results():
    """A run of each kind of arm, at a rate so low that most updates are below half a spacing."""
    names = (
        "float32/float32",
        "nearest/float32",
        "stochastic/offset",
        "stochastic/dynamic",
        "kahan/float32",
        "split24/offset",
        "float32/offset",
        "stochastic/bfloat16_stochastic",
    )
    cell = {"optimizer": "adamw", "rate": "1/30", "seed": 0}
    return {name: runs.measure(DIGITS, cell | {"arm": name}) for name in names}


def test_all_arms_train_alike(results):
    losses = {name: result["loss"] for name, result in results.items()}
    assert max(losses.values()) - min(losses.values()) < 0.05


def test_kept_bytes_tell_the_arms_apart(results):
    kept = {name: result["kept_bytes"] for name, result in results.items()}
    assert kept["float32/float32"] == pytest.approx(12, abs=0.3)
    assert kept["nearest/float32"] == pytest.approx(10, abs=0.3)
    assert kept["kahan/float32"] == pytest.approx(12, abs=0.3)
    assert 4 < kept["stochastic/offset"] < kept["split24/offset"] < kept["float32/offset"] < 8


@pytest.mark.parametrize("weights", ["kahan", "split24"])
def test_weights_begin_with_what_rounding_them_lost_or_with_nothing(weights):
    random = np.random.default_rng(0)
    first = {"w": jnp.asarray(random.standard_normal((64, 128)), jnp.float32)}
    errors = []
    for name in (weights, weights + FROM_FLOAT32):
        arm = Arm.named("adamw", f"{name}/offset")
        params, state = arm.begin(lambda count: 1e-3, 0, first)
        assert params["w"].dtype == jnp.bfloat16
        back = sr8.master_params(arm.build(lambda count: 1e-3, 0), params, state)
        errors.append(float(jnp.abs(back["w"] / first["w"] - 1).max()))
    assert errors[0] > 2**-10 > 2**-16 >= errors[1]


def test_probes_see_what_each_rounding_does(results):
    def last(name, key):
        return results[name]["probes"][0][key]

    for name, result in results.items():
        assert [probe["step"] for probe in result["probes"]] == [10, 20], name
        assert last(name, "ratio") < 0.5, name  # of the median weight the change is below half a spacing
    assert last("float32/float32", "applied") == pytest.approx(1, abs=1e-5)
    assert last("kahan/float32", "applied") == pytest.approx(1, abs=1e-2)
    assert last("split24/offset", "applied") == pytest.approx(1, abs=1e-2)
    assert last("stochastic/offset", "applied") == pytest.approx(1, abs=0.2)
    assert last("nearest/float32", "moved") < 1 - last("nearest/float32", "lost") + 0.05
    assert last("stochastic/offset", "moved") > last("nearest/float32", "moved")
    assert last("float32/float32", "moved") > 0.9
    assert last("float32/float32", "root_nu") == pytest.approx(1, abs=1e-4)
    assert last("stochastic/offset", "root_nu") == pytest.approx(1, abs=0.02)
    assert results["stochastic/bfloat16_stochastic"]["probes"][0]["root_nu"] is None


def test_a_run_repeats_but_for_its_times(results):
    cell = {"optimizer": "adamw", "arm": "stochastic/offset", "rate": "1/30", "seed": 0}
    again = runs.measure(DIGITS, cell)
    assert {k: v for k, v in again.items() if k != "ms"} == {
        k: v for k, v in results["stochastic/offset"].items() if k != "ms"
    }
    other = runs.measure(DIGITS, cell | {"seed": 1})
    assert other["loss"] != again["loss"]
    assert "leaves" in again
    assert "leaves" not in other


def test_spacing_is_that_of_bfloat16():
    random = np.random.default_rng(0)
    x = np.float32(random.standard_normal(4096) * 10.0 ** random.uniform(-8, 4, 4096))
    low = x.view(np.uint32) & 0xFFFF0000
    gap = np.abs((low + 0x10000).view(np.float32) - low.view(np.float32))
    np.testing.assert_array_equal(probes.spacing(jnp.asarray(x)), gap)


def test_momentum_is_rounded_to_nearest_or_right_on_average():
    x = jnp.linspace(-3.0, 3.0, 1001)
    np.testing.assert_array_equal(momentum._bfloat16(x, None), np.asarray(x).astype(ml_dtypes.bfloat16))
    drawn = jax.vmap(lambda key: momentum._bfloat16(x, key))(jax.random.split(jax.random.key(0), 4096))
    spacing = np.asarray(probes.spacing(x))
    assert np.abs(np.asarray(drawn).mean(0) - x).max() < (spacing / 2 / 64 * 6).max()  # six standard errors
    assert set(np.unique(np.asarray(drawn.astype(jnp.bfloat16) == drawn))) == {True}


def test_an_arm_that_is_none_is_refused():
    for arm in (("adamw", "float16", "float32"), ("adamw", "float32", "int8"), ("adam", "float32", "float32")):
        with pytest.raises(ValueError, match="is none of"):
            Arm(*arm)
    with pytest.raises(ValueError, match="BF16 momentum"):
        Arm("lion", "stochastic", "bfloat16_nearest")


def test_the_registration_says_what_can_be_run():
    whole = registration.load()
    for name, settings in whole["experiments"].items():
        if settings["module"] != "runs":
            continue
        cells = runs.cells(settings)
        keys = [json.dumps(cell) for cell in cells]
        assert len(set(keys)) == len(keys)
        assert settings["steps"] % settings["probes"] == 0
        for cell in cells:
            assert Arm.named(cell["optimizer"], cell["arm"]).moments in MOMENTS
            assert Fraction(cell["rate"]) > 0
            assert cell["seed"] < settings.get("pilot", {"seed": 1000})["seed"]
        for claim in (claim for claim in whole["claims"] if claim["experiment"] == name):
            for arm in (claim["arm"], claim["reference"]):
                assert any(cell["arm"] == arm and cell["rate"] == claim["rate"] for cell in cells), claim
        for part in settings.get("smoke", []):
            assert any(part.items() <= cell.items() for cell in cells), part


def test_cells_of_an_arm_come_together():
    cells = runs.cells(registration.load()["experiments"]["pretrain"])
    groups = [name for name, _ in itertools.groupby(cells, key=run.group)]
    assert len(set(groups)) == len(groups)


def test_records_go_on_where_they_stopped(tmp_path):
    place = {"device": "cpu", "versions": {"jax": "1"}}
    first = records.Records(tmp_path, "one")
    first.add({"seed": 0}, {"loss": 1.0}, place)
    second = records.Records(tmp_path, "one")
    assert second.find({"seed": 0})["result"] == {"loss": 1.0}
    assert second.find({"seed": 1}) is None
    second.add({"seed": 1}, {"loss": 2.0}, place | {"device": "gpu"})
    content = json.loads((tmp_path / "one.json").read_text())
    assert [row["environment"] for row in content["rows"]] == [0, 1]
    assert len(content["environments"]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["one.json"]


def test_smoke_sees_the_digits_that_differ():
    old = {"loss": 1.23456, "ms": 3.0, "probes": [{"ratio": 0.5}], "text": 7}
    assert run.differences(old, old | {"loss": 1.234561, "ms": 9.0}) == []
    assert run.differences(old, old | {"loss": 1.2347}) == [("loss", 1.23456, 1.2347)]
    assert run.differences(old, old | {"probes": [{"ratio": 0.6}]}) == [("probes.0.ratio", 0.5, 0.6)]
    assert run.differences(old, old | {"text": 8}) == [("text", 7, 8)]
    assert run.differences(old, {k: v for k, v in old.items() if k != "loss"}) == [("loss", 1.23456, None)]


def test_unknown_experiments_are_refused():
    with pytest.raises(SystemExit, match="no such experiments"):
        run.registered("cpu", ["pretraining"])


def test_a_checkout_counts_as_changed_by_anything_but_records(tmp_path, monkeypatch):
    study = tmp_path / "examples" / "study"
    (study / "records").mkdir(parents=True)
    for path in (study / "run.py", study / "records" / "one.json"):
        path.write_text("before")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *command], check=True)
    monkeypatch.setattr(records, "HERE", study)
    commit = records.head()
    assert len(commit) == 12
    (study / "records" / "one.json").write_text("after")
    assert records.head() == commit
    (study / "run.py").write_text("after")
    assert records.head() == f"{commit}-dirty"
