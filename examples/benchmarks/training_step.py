"""Peak memory and time of whole training steps of a language model, with one optimizer; JAX's peak never falls.

python examples/benchmarks/training_step.py --only adamw --json training.json
"""

import os

# As in step.py, before JAX starts: the peak of the allocator is what is measured.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import argparse
import functools
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import record
from contestants import CONTESTANTS
from step import PACKAGES, kept_bytes, memory, peak_bytes

sys.path.insert(0, str(Path(__file__).parents[1]))
from transformer import Transformer, loss

# 20 layers of width 2048 and a vocabulary of bytes; some 1 G parameters.
LARGE = dict(length=1024, width=2048, layers=20, heads=16)
SMALL = dict(length=32, width=64, layers=2, heads=2)


def measure(name: str, size: dict[str, int], batch: int, steps: int) -> dict[str, Any]:
    """One row: parameters in the contestant's dtype, layers in BF16, forward, backward and step in one jit."""
    contestant = CONTESTANTS[name]
    init, step = contestant.build()

    def model() -> Any:
        return Transformer(vocabulary=256, dtype=jnp.bfloat16, param_dtype=contestant.params, rngs=nnx.Rngs(0), **size)

    structure, _ = nnx.split(nnx.eval_shape(model), nnx.Param)
    params = nnx.jit(lambda: nnx.state(model(), nnx.Param))()
    state = jax.jit(init)(params)
    windows = jax.random.randint(jax.random.key(1), (batch, size["length"] + 1), 0, 256).astype(jnp.uint8)
    count = sum(math.prod(p.shape) for p in jax.tree.leaves(params))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params, state, windows):
        value, grads = jax.value_and_grad(lambda params: loss(nnx.merge(structure, params), windows))(params)
        grads = jax.tree.map(lambda g: g.astype(contestant.grads), grads)
        params, state = step(params, state, grads)
        return params, state, value

    compiled = train_step.lower(params, state, windows).compile()
    kept = kept_bytes(params) + kept_bytes(state)
    times, value = [], None
    for _ in range(steps + 2):
        begin = time.perf_counter()
        params, state, value = compiled(params, state, windows)
        jax.block_until_ready(value)
        times.append(time.perf_counter() - begin)
    peak = peak_bytes()
    row: dict[str, Any] = {"contestant": name, "parameters": count, "batch": batch} | size
    row |= {"kept_gb": record.digits(kept / 1e9), "peak_gb": peak and record.digits(peak / 1e9)}
    row |= {"ms": record.digits(statistics.median(times[2:]) * 1e3), "loss": float(value)}
    return row | memory(compiled, count)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=CONTESTANTS, default="adamw", metavar="NAME", help="the optimizer")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a step")
    parser.add_argument("--steps", type=int, default=10, help="whose median time counts")
    parser.add_argument("--small", action="store_true", help="a model for a try on a CPU")
    parser.add_argument("--json", metavar="FILE", help="write the record there")
    parser.add_argument("--commit", help="where git cannot tell")
    arguments = parser.parse_args(argv)
    device = jax.local_devices()[0]
    result = record.environment(device.device_kind, (*PACKAGES, "flax"), platform=device.platform)
    result["commit"] = arguments.commit or result["commit"]
    row = measure(arguments.only, SMALL if arguments.small else LARGE, arguments.batch, arguments.steps)
    print(", ".join(f"{key} {value}" for key, value in row.items()))
    record.save(arguments.json, result | {"rows": [row]})


if __name__ == "__main__":
    main()
