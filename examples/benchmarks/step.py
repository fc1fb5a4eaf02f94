"""Time and memory of an optimizer's step in JAX, beside the speed of a plain copy in the same process.

python examples/benchmarks/step.py --shapes single llama1b --json step.json
"""

import os

# Before JAX starts. With the default, JAX takes three quarters of a GPU at once, and its peak says nothing.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import functools
import math
import re
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import optax_sr8bit as sr8
import record
import runner
import shapes
from contestants import CONTESTANTS, Contestant, Step

PACKAGES = (
    *("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "optax"),
    *("triton", "jax-triton", "flashoptim-jax"),
)
# In training every step has gradients of its own, and is a program of its own. Here XLA would take out of the loop what
# depends on the gradients or on the place of an element alone, and time less than a step (on a CPU: with 35 B more).
IN_THE_LOOP = {
    "xla_disable_hlo_passes": "while-loop-invariant-code-motion,while-loop-expensive-invariant-code-motion",
}
IN_FLIGHT = 4  # timings that are enqueued before the first is waited for: the host's share hides behind the device's


def draw(tree: shapes.Shapes, scale: float, dtype: Any, seed: int) -> dict[str, jax.Array]:
    """Normal numbers: zeros would draw less power, and let a GPU clock higher, than training does."""
    keys = jax.random.split(jax.random.key(seed), len(tree))
    return {path: _leaf(key, shape, scale, dtype) for key, (path, shape) in zip(keys, tree.items(), strict=True)}


@functools.partial(jax.jit, static_argnums=(1, 3))
def _leaf(key: jax.Array, shape: tuple[int, ...], scale: jax.typing.ArrayLike, dtype: Any) -> jax.Array:
    # In pieces, so that drawing a large leaf does not set the peak of memory.
    pieces = math.gcd(shape[0], 256) if math.prod(shape) > 2**24 else 1
    part = (shape[0] // pieces, *shape[1:]) if shape else ()
    drawn = jax.lax.map(lambda k: (jax.random.normal(k, part) * scale).astype(dtype), jax.random.split(key, pieces))
    return drawn.reshape(shape)


def kept_bytes(tree: Any) -> int:
    return sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(tree))


def looped(step: Step, steps: int) -> Callable[..., tuple[Any, Any]]:
    """So many steps in one program: what is timed is the device, not the calls."""

    def loop(params, state, grads):
        return jax.lax.fori_loop(0, steps, lambda index, carry: step(*carry, grads), (params, state))

    return loop


def measure(contestant: Contestant, tree: shapes.Shapes, steps: int, rounds: int) -> dict[str, Any]:
    """One row: times, rates, bytes. The arrays are released on return."""
    init, step = contestant.build()
    params = draw(tree, 0.02, contestant.params, 0)
    grads = draw(tree, 1e-3, contestant.grads, 1)
    state = jax.jit(init)(params)
    size = shapes.parameters(tree)
    moved = record.moved_bytes(kept_bytes(params), kept_bytes(grads), kept_bytes(state))
    row = {"kept_bytes_per_parameter": record.digits((kept_bytes(params) + kept_bytes(state)) / size)}

    begin = time.perf_counter()
    one = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, grads).compile()
    row["compile_s"] = record.digits(time.perf_counter() - begin, 3)
    row |= memory(one, size)
    many = jax.jit(looped(step, steps), donate_argnums=(0, 1)).lower(params, state, grads).compile(IN_THE_LOOP)
    row["loop_temporary_bytes_per_parameter"] = memory(many, size).get("temporary_bytes_per_parameter")

    peak = peak_bytes()
    # Time until a call returns, the device idle before each: then the host waits for nothing, and what it takes is
    # the cost of handing over the arrays and of starting the work. (On a CPU, small work is done within the call.)
    returns = []
    for _ in range(2 * rounds + 2):
        jax.block_until_ready((params, state))
        begin = time.perf_counter()
        params, state = one(params, state, grads)
        returns.append(time.perf_counter() - begin)
    row["dispatch_ms"] = record.digits(statistics.median(returns[2:]) * 1e3)
    jax.block_until_ready((params, state))
    if peak is not None and (after := peak_bytes()) > peak:  # it never falls: only a new record is this contestant's
        row["device_peak_bytes_per_parameter"] = record.digits(after / size)

    times = []
    for _ in range(rounds + 1):
        jax.block_until_ready((params, state))
        begin = time.perf_counter()
        for _ in range(IN_FLIGHT):
            params, state = many(params, state, grads)
        jax.block_until_ready((params, state))
        times.append((time.perf_counter() - begin) / (IN_FLIGHT * steps))
    return row | record.rates(statistics.median(times[1:]), size, moved)


def memory(compiled: Any, size: int) -> dict[str, Any]:
    """Bytes of the compiled step, and how many Triton kernels it starts."""
    row: dict[str, Any] = {}
    if analysis := compiled.memory_analysis():
        row |= {
            "aliased_bytes_per_parameter": record.digits(analysis.alias_size_in_bytes / size),
            "temporary_bytes_per_parameter": record.digits(analysis.temp_size_in_bytes / size),
            "output_bytes_per_parameter": record.digits(analysis.output_size_in_bytes / size),
        }
    return row | {"triton_calls": len(re.findall(r'custom_call_target="[^"]*triton', compiled.as_text() or ""))}


def peak_bytes() -> int | None:
    """The allocator's highest mark since the process began; a CPU has none."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def copy_gb_per_s(small: bool) -> float:
    """Of `jnp.copy` on 1 GiB of float32, bytes read and written, eight in flight."""
    size = 2**28 if jax.default_backend() != "cpu" and not small else 2**24
    array = jax.block_until_ready(draw({"array": (256, size // 256)}, 1.0, jnp.float32, 2)["array"])
    times = []
    for _ in range(10):
        begin = time.perf_counter()
        jax.block_until_ready([jnp.copy(array) for _ in range(8)])
        times.append((time.perf_counter() - begin) / 8)
    return 2 * array.nbytes / statistics.median(times[1:]) / 1e9


def main(argv: list[str] | None = None) -> None:
    arguments = runner.parse(__doc__, CONTESTANTS, argv)
    device = jax.local_devices()[0]
    result = record.environment(device.device_kind, PACKAGES, platform=device.platform, optax_sr8bit=sr8.__version__)
    runner.run(arguments, CONTESTANTS, measure, copy_gb_per_s, result)


if __name__ == "__main__":
    main()
