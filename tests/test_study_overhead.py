"""The study's timings of a step with and without random bits, on a small scale: what is timed, beside what."""

import sys
from pathlib import Path

import jax
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "study"))
import overhead
import registration
import tasks
from arms import Arm

pytestmark = pytest.mark.slow

SMALL = dict(
    text="code", optimizer="adamw", width=64, layers=1, head=32, length=16, batch=2, steps=8, validation_batches=1
)
SMALL |= dict(shape="decaying", end=0.1, tuned=1e-3, rounds=2, loop=dict(optimizer=2, training=2))
ARMS = ["float32/float32", "stochastic/offset", "float32/float32"]


@pytest.mark.parametrize("kind", overhead.KINDS)
def test_every_arm_is_timed_in_every_round(kind):
    result = overhead.measure(SMALL | {"arms": ARMS}, {"kind": kind})
    assert list(result["ms"]) == [*ARMS[:2], overhead.AGAIN]
    times = np.array(list(result["ms"].values()))
    assert times.shape == (3, 2)
    assert (times > 0).all()
    assert result["parameters"] == sum(leaf.size for leaf in jax.tree.leaves(tasks.language(SMALL).initial(0)))


@pytest.mark.parametrize("kind", overhead.KINDS)
def test_a_turn_is_so_many_steps_of_the_arm(kind, monkeypatch):
    carries = []

    def keep(run, carry):
        carries.extend([jax.tree.map(np.asarray, carry[:2]), jax.tree.map(np.asarray, run(carry)[:2])])

    monkeypatch.setattr(overhead, "_timed", keep)
    overhead.KINDS[kind](tasks.language(SMALL), Arm.named("adamw", "stochastic/offset"), 1e-3, 3)
    (before, begun), (after, state) = carries
    assert int(state.count) == int(begun.count) + 3
    moved = [np.mean(a != b) for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)]
    assert min(moved) > 0


def test_every_round_begins_with_another_arm(monkeypatch):
    order = []
    monkeypatch.setitem(overhead.KINDS, "training", lambda task, arm, *_: lambda: order.append(arm.name) or 1.0)
    overhead.measure(SMALL | {"arms": ["nearest/offset", "stochastic/offset"]}, {"kind": "training"})
    assert order == ["nearest/offset", "stochastic/offset", "stochastic/offset", "nearest/offset", *order[:2]]


def test_runs_made_again_are_of_the_same_settings():
    experiments = registration.load()["experiments"]
    own = ("grid", "follow", "pilot")  # which runs; what is followed reads gradients and changes nothing
    first, again = (
        {k: v for k, v in experiments[name].items() if k not in own} for name in ("h200_adamw", "h200_again")
    )
    assert first == again


def test_the_registered_base_draws_no_bits_and_runs_again():
    settings = registration.load()["experiments"]["h200_overhead"]
    assert settings["arms"][0] == settings["arms"][-1] == "nearest/offset_nearest"
    assert settings["loop"].keys() == overhead.KINDS.keys() == {cell["kind"] for cell in overhead.cells(settings)}
    for name in settings["arms"]:
        Arm.named(settings["optimizer"], name)
