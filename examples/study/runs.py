"""The experiments that train: a cell is one run, {"optimizer", "arm", "rate", "seed"}."""

import dataclasses
import functools
import itertools
from fractions import Fraction
from typing import Any

import jax

from arms import Arm
from tasks import task
from training import Run, train


def cells(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """All runs of the grids, each once; those of one arm together, since they share its compiled program."""
    found = {
        (arm, rate, seed): {"optimizer": settings["optimizer"], "arm": arm, "rate": rate, "seed": seed}
        for grid in settings["grid"]
        for arm, rate, seed in itertools.product(grid["arms"], grid["rates"], range(grid["seeds"]))
    }
    order = list(dict.fromkeys(arm for arm, _, _ in found))
    return [found[key] for key in sorted(found, key=lambda key: (order.index(key[0]), -Fraction(key[1]), key[2]))]


def measure(settings: dict[str, Any], cell: dict[str, Any]) -> dict[str, Any]:
    """Train one run; its losses, probes, time and bytes."""
    arm = Arm.named(cell["optimizer"], cell["arm"])
    begun = None
    if "start" in settings:
        begun = optimum(_items(settings["start"]), cell["seed"])
    follow = settings["follow"] == "all" or (cell["seed"] == 0 and cell["arm"] in settings["follow"])
    rate = settings["tuned"] * float(Fraction(cell["rate"]))
    goal = task(_items(settings))
    run = train(goal, arm, rate, cell["seed"], probes=settings["probes"], follow=follow, start=begun)
    return _result(run, settings, rate) | {"text": goal.text} | ({} if cell["seed"] else {"leaves": _middle(run)})


@functools.cache
def optimum(items: tuple[tuple[str, Any], ...], seed: int) -> Any:
    """The weights that FP32 training at the tuned rate ends with."""
    settings = dict(items)
    arm = Arm(settings["optimizer"], "float32", "float32")
    run = train(task(items), arm, settings["tuned"], seed, probes=1, follow=False)
    return jax.block_until_ready(run.params)


def _items(settings: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """What says the task, hashable."""
    return tuple((key, value) for key, value in settings.items() if isinstance(value, str | int | float))


def _result(run: Run, settings: dict[str, Any], rate: float) -> dict[str, Any]:
    step = settings["steps"] // settings["probes"]
    return {
        **{name: _digits(value) for name, value in run.validation.items()},
        "training": _digits(run.training),
        "learning_rate": _digits(rate),
        "ms": _digits(run.seconds * 1e3),
        "kept_bytes": _digits(run.kept_bytes),
        "temporary_bytes": _digits(run.temporary_bytes),
        "probes": [{"step": step * (i + 1), **_probe(probe["all"])} for i, probe in enumerate(run.probes)],
    }


def _middle(run: Run) -> dict[str, Any]:
    """The leaves at the middle probe."""
    return {name: _probe(probe) for name, probe in run.probes[len(run.probes) // 2].items() if name != "all"}


def _probe(probe: Any) -> dict[str, float | None]:
    return {key: None if value is None else _digits(value, 5) for key, value in dataclasses.asdict(probe).items()}


def _digits(value: float, count: int = 6) -> float:
    return float(f"{value:.{count}g}")
