"""The optimizers in JAX that are timed: ours with the choices that cost something, Optax's, and flashoptim-jax's."""

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax

import optax_sr8bit as sr8

BASELINE = "optax.adamw/bf16"
Step = Callable[[Any, Any, Any], tuple[Any, Any]]


@dataclasses.dataclass(frozen=True)
class Contestant:
    """An optimizer, not yet made: what fails in making it is that contestant's failure.

    Attributes:
      make: returns the optimizer, which has `init` and either `update` or `step`.
      door: how it is stepped: "step" and "apply" as in Optax and here, "flash" with flashoptim-jax's argument order.
      params: dtype of the parameters.
      grads: dtype of the gradients.
    """

    make: Callable[[], Any]
    door: str = "step"
    params: Any = jnp.bfloat16
    grads: Any = jnp.bfloat16

    def build(self) -> tuple[Callable[[Any], Any], Step]:
        """`init` and (params, state, grads) -> (params, state)."""
        optimizer = self.make()

        def apply(params, state, grads):
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        doors: dict[str, Step] = {
            "step": lambda params, state, grads: optimizer.step(grads, state, params),
            "apply": apply,
            "flash": lambda params, state, grads: optimizer.step(params, state, grads),
        }
        return optimizer.init, doors[self.door]


def _adamw(door: str = "step", grads: Any = jnp.bfloat16, **keywords: Any) -> Contestant:
    return Contestant(lambda: sr8.adamw(1e-3, weight_decay=0.1, **keywords), door, grads=grads)


def _lion(**keywords: Any) -> Contestant:
    return Contestant(lambda: sr8.lion(1e-4, weight_decay=0.1, **keywords))


def _chain(clip: Callable[[float], Any]) -> Contestant:
    return Contestant(lambda: sr8.chain(clip(1.0), sr8.adamw(1e-3, weight_decay=0.1)))


def _parts() -> Any:
    """AdamW of parts: any Optax chain with 8-bit moments that ends in stochastic rounding."""
    return sr8.chain(
        sr8.quantize_moments(optax.scale_by_adam()),
        optax.add_decayed_weights(0.1),
        optax.scale_by_learning_rate(1e-3),
        sr8.stochastic_round(0),
    )


def _optax(name: str, learning_rate: float, dtype: Any) -> Contestant:
    return Contestant(lambda: getattr(optax, name)(learning_rate, weight_decay=0.1), "apply", dtype, dtype)


def _flash(name: str, learning_rate: float, bits: int | None) -> Contestant:
    def make():
        import flashoptim_jax  # installed by few; it runs on GPUs alone

        factory = getattr(flashoptim_jax, name)
        return factory(learning_rate=learning_rate, weight_decay=0.1, master_weight_bits=bits)

    return Contestant(make, "flash")


NO_DITHER = sr8.codecs.Offset(dither="nearest")

CONTESTANTS: dict[str, Contestant] = {
    "adamw": _adamw(),
    "adamw/block_128": _adamw(block_size=128),
    "adamw/no_random_bits": _adamw(rounding="nearest", codec=NO_DITHER),
    "adamw/nearest_rounding": _adamw(rounding="nearest"),
    "adamw/nearest_dither": _adamw(codec=NO_DITHER),
    "adamw/philox_dither": _adamw(codec=sr8.codecs.Offset(dither="philox")),
    "adamw/offset_wide": _adamw(codec="offset_wide"),
    "adamw/dynamic": _adamw(codec="dynamic"),
    "adamw/float32_moments": _adamw(codec="float32"),
    "adamw/f32_gradients": _adamw(grads=jnp.float32),
    "adamw/update_apply": _adamw("apply"),
    "adamw/in_place": _adamw("apply", in_place=True),
    "adamw/xla": _adamw(implementation="xla"),
    "adamw/companded": _adamw(codec="companded"),
    "adamw/fp8": _adamw(codec="fp8"),
    "adamw/four_bit": _adamw(codec="four_bit"),
    "adamw/byte_scales": _adamw(codec=sr8.codecs.Offset(scales="power_of_two")),
    "adamw/kahan": _adamw(rounding="kahan"),
    "adamw/split24": _adamw(rounding="split24"),
    "adamw/split32": _adamw(rounding="split32"),
    "adamw/fp8_parameters": dataclasses.replace(_adamw(), params=jnp.float8_e4m3fn),
    "adamw/clip": _chain(sr8.clip_by_global_norm),
    "adamw/optax_clip": _chain(optax.clip_by_global_norm),
    "adamw/of_parts": Contestant(_parts),
    "sgd": Contestant(lambda: sr8.sgd(1e-2)),
    "sgd/momentum": Contestant(lambda: sr8.sgd(1e-2, momentum=0.9)),
    "rmsprop": Contestant(lambda: sr8.rmsprop(1e-3)),
    "rmsprop/momentum": Contestant(lambda: sr8.rmsprop(1e-3, momentum=0.9)),
    "adagrad": Contestant(lambda: sr8.adagrad(1e-2)),
    "ademamix": Contestant(lambda: sr8.ademamix(1e-3, weight_decay=0.1)),
    "adan": Contestant(lambda: sr8.adan(1e-3, weight_decay=0.1)),
    "lamb": Contestant(lambda: sr8.lamb(1e-3, weight_decay=0.1)),
    "lars": Contestant(lambda: sr8.lars(1.0, weight_decay=0.1)),
    "adafactor/momentum": Contestant(lambda: sr8.adafactor(1e-3, momentum=0.9)),
    "schedule_free_adamw": Contestant(lambda: sr8.schedule_free_adamw(1e-3)),
    "lion": _lion(),
    "lion/no_random_bits": _lion(rounding="nearest", codec=NO_DITHER),
    "lion/four_bit": _lion(codec="four_bit"),
    "lion/split24": _lion(rounding="split24"),
    "lion/xla": _lion(implementation="xla"),
    BASELINE: _optax("adamw", 1e-3, jnp.bfloat16),
    "optax.adamw/fp32": _optax("adamw", 1e-3, jnp.float32),
    "optax.lion/bf16": _optax("lion", 1e-4, jnp.bfloat16),
}
if importlib.util.find_spec("flashoptim_jax"):
    CONTESTANTS |= {
        "flashoptim_jax.adamw/bf16": _flash("flash_adamw", 1e-3, None),
        "flashoptim_jax.adamw/24_bit": _flash("flash_adamw", 1e-3, 24),
        "flashoptim_jax.lion/24_bit": _flash("flash_lion", 1e-4, 24),
    }
