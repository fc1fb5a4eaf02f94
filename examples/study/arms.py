"""An arm: how weights are stored and rounded, and how moments are kept. An arm is named "weights/moments"."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

import optax_sr8bit as sr8
from momentum import round_momentum

FROM_FLOAT32 = "_from_float32"
"""Ends the names of weights that begin with what rounding the first ones lost, instead of nothing, beside them."""
WEIGHTS = ("float32", "nearest", "stochastic", "kahan", "split24", "kahan" + FROM_FLOAT32, "split24" + FROM_FLOAT32)
MOMENTS = ("float32", "offset", "offset_nearest", "dynamic", "bfloat16_nearest", "bfloat16_stochastic")
OPTIMIZERS = ("adamw", "lion", "sgd")
DECAY = 0.1
"""Weight decay of AdamW and Lion."""


@dataclasses.dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes:
      optimizer: "adamw", "lion" or "sgd" (momentum 0.9).
      weights: "float32", or the rounding of BF16 weights, `FROM_FLOAT32` behind it or not.
      moments: "float32"; a codec of 8 bits, "offset_nearest" being `offset` without dither; or "bfloat16_nearest" and
        "bfloat16_stochastic", which round the momentum alone, to nearest or stochastically.
    """

    optimizer: str
    weights: str
    moments: str

    def __post_init__(self):
        for value, known in ((self.optimizer, OPTIMIZERS), (self.weights, WEIGHTS), (self.moments, MOMENTS)):
            if value not in known:
                raise ValueError(f"{self}: {value!r} is none of {known}")
        if self.rounds_momentum and (self.optimizer != "adamw" or self.weights == "float32"):
            raise ValueError(f"{self}: BF16 momentum is built for AdamW and BF16 weights")

    @classmethod
    def named(cls, optimizer: str, name: str) -> "Arm":
        """From "weights/moments"."""
        weights, moments = name.split("/")
        return cls(optimizer, weights, moments)

    @property
    def name(self) -> str:
        return f"{self.weights}/{self.moments}"

    @property
    def dtype(self) -> Any:
        """Of the stored weights."""
        return jnp.float32 if self.weights == "float32" else jnp.bfloat16

    @property
    def rounds_momentum(self) -> bool:
        return self.moments.startswith("bfloat16")

    @property
    def corrects(self) -> bool:
        """Whether something is kept beside the weights."""
        return self.rounding in ("kahan", "split24")

    @property
    def rounding(self) -> str:
        """Of the weights."""
        return self.weights.removesuffix(FROM_FLOAT32)

    @property
    def is_reference(self) -> bool:
        """FP32 throughout: Optax's own optimizer, nothing of this library."""
        return self.weights == self.moments == "float32"

    def build(self, schedule: optax.Schedule, seed: int) -> Any:
        """The optimizer."""
        if self.is_reference:
            return getattr(optax, self.optimizer)(schedule, **self._settings())
        options: dict[str, Any] = {"seed": seed}
        if self.weights != "float32":
            options["rounding"] = self.rounding
        if self.rounds_momentum:
            return sr8.chain(
                round_momentum(optax.scale_by_adam(), stochastic=self.moments == "bfloat16_stochastic", seed=seed),
                optax.add_decayed_weights(DECAY),
                optax.scale_by_learning_rate(schedule),
                sr8.stochastic_round(**options),
            )
        codec = sr8.codecs.Offset(dither="nearest") if self.moments == "offset_nearest" else self.moments
        return getattr(sr8, self.optimizer)(schedule, codec=codec, **options, **self._settings())

    def begin(self, schedule: optax.Schedule, seed: int, weights: Any) -> tuple[Any, Any]:
        """Weights as stored, copied since steps donate them, and the optimizer's state, for FP32 ones."""
        tx = self.build(schedule, seed)
        if self.weights.endswith(FROM_FLOAT32):
            return sr8.from_master(tx, weights)
        params = jax.tree.map(lambda p: jnp.array(p, self.dtype, copy=True), weights)
        return params, tx.init(params)

    def unrounded(self, schedule: optax.Schedule) -> Any:
        """The same for FP32 weights, which nothing rounds."""
        plain = dataclasses.replace(self, weights="stochastic") if self.corrects else self
        return plain.build(schedule, 0)

    def _settings(self) -> dict[str, Any]:
        return {"momentum": 0.9} if self.optimizer == "sgd" else {"weight_decay": DECAY}


def step_of(tx: Any) -> Any:
    """`step(grads, state, params)` of any Optax optimizer."""
    if hasattr(tx, "step"):
        return tx.step

    def step(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step
