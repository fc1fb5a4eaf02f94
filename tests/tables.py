"""The tables that the contract tests run over, and the few helpers they share.

A row in `OPTIMIZERS` buys every contract test; a row in `SHAPES` buys every shape test. What the state must look
like is written here a second time, from the specification alone: nothing in this file asks the library.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import optax_sr8bit as sr8

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32


class Optimizer(NamedTuple):
    """One optimizer under test, beside the Optax factory whose arguments it mirrors."""

    name: str
    factory: Callable[..., Any]
    optax: Callable[..., Any]
    learning_rate: float
    fast: float  # a rate from which the targets of test_contract.py converge in 3,000 steps
    kwargs: dict[str, Any]
    moments: tuple[str, ...]
    bytes_per_parameter: float  # BF16 weight, codes and scales of a wide leaf, upper limit

    def __call__(self, learning_rate: Any = None, **kwargs: Any) -> Any:
        return self.factory(self.learning_rate if learning_rate is None else learning_rate, **{**self.kwargs, **kwargs})

    def reference(self, learning_rate: Any = None, **kwargs: Any) -> Any:
        """The namesake in Optax, with the same shared arguments."""
        return self.optax(self.learning_rate if learning_rate is None else learning_rate, **{**self.kwargs, **kwargs})

    @property
    def arguments(self) -> Any:
        return inspect.signature(self.optax).parameters

    def takes(self, kwargs: Any) -> bool:
        """Whether it has arguments of all these names."""
        return set(kwargs) <= set(inspect.signature(self.factory).parameters)

    @property
    def decays(self) -> bool:
        return "weight_decay" in self.arguments

    @property
    def masked(self) -> str:
        """The argument that says which leaves decay."""
        return next(name for name in self.arguments if name.endswith("mask"))

    @property
    def unsigned(self) -> tuple[str, ...]:
        """The moments that are averages or sums of squares."""
        return tuple(name for name in self.moments if name in ("nu", "n", "sum_of_squares"))


ADAMW = Optimizer("adamw", sr8.adamw, optax.adamw, 1e-2, 1e-1, {}, ("mu", "nu"), 4.04)
NESTEROV = Optimizer("adamw_nesterov", sr8.adamw, optax.adamw, 1e-2, 1e-1, {"nesterov": True}, ("mu", "nu"), 4.04)
ADAM = Optimizer("adam", sr8.adam, optax.adam, 1e-2, 1e-1, {}, ("mu", "nu"), 4.04)
LION = Optimizer("lion", sr8.lion, optax.lion, 3e-3, 1e-2, {"weight_decay": 1e-4}, ("mu",), 3.02)
SGD = Optimizer("sgd", sr8.sgd, optax.sgd, 1e-1, 5e-3, {"momentum": 0.9}, ("trace",), 3.02)
RMSPROP = Optimizer(
    "rmsprop", sr8.rmsprop, optax.rmsprop, 1e-3, 3e-2, {"momentum": 0.5, "centered": True}, ("nu", "mu", "trace"), 5.05
)
ADAGRAD = Optimizer("adagrad", sr8.adagrad, optax.adagrad, 1e-2, 1.0, {}, ("sum_of_squares",), 3.02)
ADEMAMIX = Optimizer(
    "ademamix", sr8.ademamix, optax.contrib.ademamix, 1e-3, 1e-1, {"weight_decay": 1e-4}, ("m1", "m2", "nu"), 5.05
)
ADAN = Optimizer("adan", sr8.adan, optax.adan, 1e-2, 1e-1, {}, ("m", "v", "n", "g"), 6.07)
NADAM = Optimizer("nadam", sr8.nadam, optax.nadam, 1e-2, 1e-1, {}, ("mu", "nu"), 4.04)
LAMB = Optimizer("lamb", sr8.lamb, optax.lamb, 1e-2, 1e-2, {"weight_decay": 1e-4}, ("mu", "nu"), 4.04)
LARS = Optimizer("lars", sr8.lars, optax.lars, 1.0, 1.0, {"trust_coefficient": 0.01}, ("trace",), 3.02)

OPTIMIZERS = (ADAMW, NESTEROV, ADAM, LION, SGD, RMSPROP, ADAGRAD, ADEMAMIX, ADAN, NADAM, LAMB, LARS)
RULES = (ADAMW, LION)  # where a test is slow
KINDS = (ADAMW, LION, LAMB)  # where the arithmetic plays no part: two moments, one, and norms of whole leaves
CODECS = ("offset", "offset_wide", "dynamic", "float32")
ROUNDINGS = ("stochastic", "nearest")
BLOCK, MIN_8BIT_SIZE, MIN_LAST_AXIS = 256, 4096, 32

SHAPES = {
    "scalar": (),
    "empty": (0,),
    "empty_rows": (0, 5),
    "empty_wide": (0, 512),
    "empty_last": (4, 0),
    "last_1": (5000, 1),
    "last_3": (2000, 3),
    "last_31": (160, 31),
    "last_32": (128, 32),
    "last_100": (48, 100),
    "last_257": (16, 257),
    "last_768": (6, 768),
    "last_50257": (1, 50257),
    "size_4095": (4095,),
    "size_4096": (4096,),
    "size_4097": (4097,),
    "stacked": (2, 4, 512),
}


def named(rows: Any) -> Any:
    """Arguments for `pytest.mark.parametrize`: one column, rows shown by name."""
    return {"argvalues": list(rows), "ids": [getattr(row, "name", None) or str(row) for row in rows]}


EVERY_OPTIMIZER = pytest.mark.parametrize("opt", **named(OPTIMIZERS))
EVERY_KIND = pytest.mark.parametrize("opt", **named(KINDS))
EVERY_RULE = pytest.mark.parametrize("opt", **named(RULES))
EVERY_CODEC = pytest.mark.parametrize("codec", CODECS)


def is_8bit(shape: tuple[int, ...], min_8bit_size: int = MIN_8BIT_SIZE) -> bool:
    return len(shape) > 0 and math.prod(shape) >= max(min_8bit_size, 1) and shape[-1] >= MIN_LAST_AXIS


def scale_shape(shape: tuple[int, ...], block: int = BLOCK) -> tuple[int, ...]:
    """Shape of an 8-bit leaf's scales: one per block along the last axis."""
    return (*shape[:-1], -(-shape[-1] // block))


def normal(shape: tuple[int, ...], seed: int, scale: float = 1.0, dtype: Any = F32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32) * np.float32(scale), dtype)


def tree(dtype: Any = BF16, seed: int = 0, scale: float = 0.02, rows: int = 16) -> dict[str, Any]:
    """A small model: wide leaves with whole and with short blocks, a leaf below the 8-bit limit, a 0-d leaf."""
    shapes = {"embed": (rows, 512), "layer": {"kernel": (rows, 300), "bias": (300,)}, "temperature": ()}
    leaves, treedef = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    return jax.tree.unflatten(treedef, [normal(s, seed + 1000 * i, scale, dtype) for i, s in enumerate(leaves)])


def small(dtype: Any = BF16) -> dict[str, Any]:
    """The least model that has both: a leaf in whole and short 8-bit blocks, and one that falls back to float32."""
    return {"layer": {"kernel": normal((16, 300), 0, 0.02, dtype), "bias": normal((40,), 1, 0.02, dtype)}}


def grads_like(params: Any, seed: int, scale: float = 1e-3, dtype: Any = None) -> Any:
    leaves, treedef = jax.tree.flatten(params)
    return jax.tree.unflatten(
        treedef, [normal(p.shape, 7919 * (seed + 1) + i, scale, dtype or p.dtype) for i, p in enumerate(leaves)]
    )


@functools.cache
def door_1(tx: Any, jit: bool = False) -> Any:
    """`update` and `apply_updates` as one function with the signature of `step`.

    The library's own functions are called without jit wherever jit is not the point: they compile once per kind of
    leaf and process, whichever transformation asks. References of Optax are compiled whole.
    """

    def advance(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(advance) if jit else advance


def run(advance: Any, params: Any, state: Any, steps: int, *, first: int = 0, scale: float = 1e-3, dtype: Any = None):
    """Advance by `steps` steps on gradients that depend on the step's number alone."""
    for i in range(first, first + steps):
        params, state = advance(grads_like(params, i, scale, dtype), state, params)
    return params, state


def path_name(path: Any) -> str:
    return "/".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)


def as_bits(x: Any) -> np.ndarray:
    """The array's own bits, so that NaN equals NaN and +0.0 differs from -0.0."""
    x = np.asarray(x)
    return x.view({1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[x.dtype.itemsize])


def assert_same_bits(actual: Any, desired: Any) -> None:
    """Every leaf equal bit for bit, in dtype and shape; the keys around the leaves may differ."""
    got, want = (jax.tree_util.tree_flatten_with_path(t)[0] for t in (actual, desired))
    assert len(got) == len(want), f"{len(got)} leaves, not {len(want)}"
    wrong = []
    for (path, a), (_, b) in zip(got, want, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        if a.dtype != b.dtype or a.shape != b.shape:
            wrong.append(f"{path_name(path)}: {a.dtype}{a.shape}, not {b.dtype}{b.shape}")
        elif (different := int(np.sum(as_bits(a) != as_bits(b)))) > 0:
            wrong.append(f"{path_name(path)}: {different} of {a.size} elements differ")
    assert not wrong, "; ".join(wrong)


def nnx_leaves(node: Any) -> list[Any]:
    """The arrays of an NNX node, whose state sorts the fields of a NamedTuple by name."""
    return jax.tree.leaves(nnx.as_pure(nnx.state(node)))


def avals(x: Any) -> Any:
    """Shape, dtype and weak type of every leaf: what decides whether jit compiles again."""
    return jax.tree.map(lambda v: (jnp.shape(v), jnp.result_type(v), bool(getattr(v, "weak_type", False))), x)


def decode_offset(codes: Any, scales: Any, signed: bool, block: int = BLOCK) -> np.ndarray:
    """Moments of one leaf under the `offset` codec, in float64: an 8-bit float with an offset."""
    codes, scales = np.asarray(codes).astype(np.uint32), np.asarray(scales, np.float64)
    magnitude = codes & 127 if signed else codes
    value = ((magnitude << 19) + np.uint32(0x3F800000)).view(np.float32).astype(np.float64) - 1
    value = np.where(codes > 127, -value, value) if signed else value
    return value * np.repeat(scales, block, axis=-1)[..., : codes.shape[-1]]
