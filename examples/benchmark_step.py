"""How long a step takes beside Optax's, on the device that JAX picks: both in one run, turn by turn.

python examples/benchmark_step.py --rows 4096 --columns 4096
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import optax_sr8bit as sr8

BASELINE = "optax.adamw"


def contestants() -> dict[str, Any]:
    """Name to transformation; those with a `step` are stepped, the others updated and applied."""
    return {
        BASELINE: optax.adamw(1e-3, weight_decay=0.1),
        "adamw": sr8.adamw(1e-3, weight_decay=0.1),
        "adamw, door 1": optax.chain(sr8.adamw(1e-3, weight_decay=0.1)),
        "adamw, in_place": optax.chain(sr8.adamw(1e-3, weight_decay=0.1, in_place=True)),
        "adamw, no random bits": sr8.adamw(
            1e-3, weight_decay=0.1, rounding="nearest", codec=sr8.codecs.Offset(dither="nearest")
        ),
        "adamw, Philox dither": sr8.adamw(1e-3, weight_decay=0.1, codec=sr8.codecs.Offset(dither="philox")),
        "adamw, offset_wide": sr8.adamw(1e-3, weight_decay=0.1, codec="offset_wide"),
        "adamw, dynamic": sr8.adamw(1e-3, weight_decay=0.1, codec="dynamic"),
        "adamw, float32": sr8.adamw(1e-3, weight_decay=0.1, codec="float32"),
        "lion": sr8.lion(1e-4, weight_decay=0.1),
    }


def stepper(tx: Any) -> Callable[..., tuple[Any, Any]]:
    """(params, state, grads) -> (params, state)."""
    if isinstance(tx, sr8.Transformation):
        return lambda params, state, grads: tx.step(grads, state, params)

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def measure(shape: tuple[int, int], rounds: int, names: list[str] | None = None) -> list[dict[str, Any]]:
    """Median times of all contestants on one BF16 leaf, their ratio to the baseline's, compile time and memory."""

    def draw(seed: int, scale: float) -> jax.Array:
        return (jax.random.normal(jax.random.key(seed), shape) * scale).astype(jnp.bfloat16)

    size = shape[0] * shape[1]
    grads = draw(1, 1e-3)
    runs, rows = {}, {}
    for name, tx in contestants().items():
        if names and name not in names:
            continue
        params = draw(0, 0.02)
        state = tx.init(params)
        begin = time.perf_counter()
        compiled = jax.jit(stepper(tx), donate_argnums=(0, 1)).lower(params, state, grads).compile()
        memory = compiled.memory_analysis()
        rows[name] = {
            "name": name,
            "compile_s": round(time.perf_counter() - begin, 2),
            "kept_bytes_per_parameter": round(memory.alias_size_in_bytes / size, 3),
            "temporary_bytes_per_parameter": round(memory.temp_size_in_bytes / size, 2),
        }
        runs[name] = [compiled, params, state, []]
    for turn in range(rounds + 1):  # the first warms up
        for run in runs.values():
            jax.block_until_ready(run[1:3])
            begin = time.perf_counter()
            run[1], run[2] = run[0](run[1], run[2], grads)
            jax.block_until_ready(run[1:3])
            if turn:
                run[3].append(time.perf_counter() - begin)
    baseline = statistics.median(runs[BASELINE][3])
    for name, row in rows.items():
        median = statistics.median(runs[name][3])
        row |= {"ms": round(median * 1e3, 2), "ratio": round(median / baseline, 2)}
        row["gparam_per_s"] = round(size / median / 1e9, 2)
    return list(rows.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=9, help="timed steps of each, taken turn by turn")
    parser.add_argument("--json", help="write the table there too")
    arguments = parser.parse_args()
    if min(arguments.rows, arguments.columns, arguments.rounds) < 1:
        parser.error("--rows, --columns and --rounds must be positive")
    table = measure((arguments.rows, arguments.columns), arguments.rounds)
    device = jax.devices()[0]
    versions = {"device": f"{device.platform} {device.device_kind}", "jax": jax.__version__, "optax": optax.__version__}
    print(f"{arguments.rows} x {arguments.columns} BF16 parameters and gradients; {versions}")
    print(f"{'':24}{'ms':>9}{'/ optax':>9}{'Gparam/s':>10}{'kept B':>8}{'temp. B':>9}{'compile s':>11}")
    for row in table:
        print(
            f"{row['name']:24}{row['ms']:9.2f}{row['ratio']:9.2f}{row['gparam_per_s']:10.2f}"
            f"{row['kept_bytes_per_parameter']:8.3f}{row['temporary_bytes_per_parameter']:9.2f}{row['compile_s']:11.2f}"
        )
    if arguments.json:
        record = {**versions, "optax_sr8bit": sr8.__version__, "shape": [arguments.rows, arguments.columns]}
        with open(arguments.json, "w") as file:
            json.dump(record | {"rows": table}, file, indent=1)


if __name__ == "__main__":
    main()
