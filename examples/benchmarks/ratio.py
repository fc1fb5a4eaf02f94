"""How long a step on one leaf takes beside `optax.adamw`'s, turn by turn: what a busy CPU slows, it slows for both.

python examples/benchmarks/ratio.py --rows 4096 --columns 4096
"""

import argparse
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

import optax_sr8bit as sr8
import record
from contestants import BASELINE, CONTESTANTS
from step import PACKAGES, draw, memory

# Alike but for the optimizer: parameters and gradients in BF16, and what any device runs.
NAMES = [name for name, c in CONTESTANTS.items() if c.params == c.grads == jnp.bfloat16 and c.door != "flash"]


def measure(shape: tuple[int, int], rounds: int, names: list[str] | None = None) -> list[dict[str, Any]]:
    """Median times of the contestants, the baseline among them, their ratio to it, compile time and memory."""
    size = shape[0] * shape[1]
    grads = draw({"leaf": shape}, 1e-3, jnp.bfloat16, 1)
    runs, rows = {}, {}
    for name in names or NAMES:
        init, step = CONTESTANTS[name].build()
        params = draw({"leaf": shape}, 0.02, jnp.bfloat16, 0)
        state = init(params)
        begin = time.perf_counter()
        compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, grads).compile()
        rows[name] = {"contestant": name, "compile_s": round(time.perf_counter() - begin, 2), **memory(compiled, size)}
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
        row["gparam_per_s"] = record.digits(size / median / 1e9, 3)
    return list(rows.values())


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=9, help="timed steps of each, taken turn by turn")
    parser.add_argument("--json", metavar="FILE", help="write the record there too")
    arguments = parser.parse_args(argv)
    if min(arguments.rows, arguments.columns, arguments.rounds) < 1:
        parser.error("--rows, --columns and --rounds must be positive")
    result = record.environment(jax.local_devices()[0].device_kind, PACKAGES, optax_sr8bit=sr8.__version__)
    result |= {"shape": [arguments.rows, arguments.columns]}
    result["rows"] = measure((arguments.rows, arguments.columns), arguments.rounds)
    print(f"{arguments.rows} x {arguments.columns} BF16 parameters and gradients; {result['device']}")
    print(f"{'':24}{'ms':>9}{'/ optax':>9}{'Gparam/s':>10}{'kept B':>8}{'temp. B':>9}{'compile s':>11}")
    for row in result["rows"]:
        print(
            f"{row['contestant']:24}{row['ms']:9.2f}{row['ratio']:9.2f}{row['gparam_per_s']:10.2f}"
            f"{row['aliased_bytes_per_parameter']:8.3f}{row['temporary_bytes_per_parameter']:9.2f}{row['compile_s']:11.2f}"
        )
    record.save(arguments.json, result)


if __name__ == "__main__":
    main()
