"""Optax's combinators, with `step` kept."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp
import optax

from optax_sr8bit import inputs
from optax_sr8bit.clipping import GradientScale, scaled
from optax_sr8bit.factory import STRUCTURAL
from optax_sr8bit.transform import Transformation


def chain(*transforms: optax.GradientTransformation) -> Transformation:
    """`optax.chain` whose last link is one of this library's optimizers, and which therefore can `step`.

    Links that only scale the gradients, as `sr8.clip_by_global_norm` does, cost no pass over them where nothing but
    such links stands between them and the optimizer. So does `grad_scale=`, where no other link sees gradients first.

    Args:
      *transforms: any transformations of the gradients, then the optimizer. It owns learning rate, decay and rounding,
        so nothing may follow it.

    Returns:
      A `Transformation` with the state of `optax.chain`, a tuple.

    Raises:
      ValueError: where the last link is no optimizer of this library, or another one is.

    Example:
      >>> import optax_sr8bit as sr8
      >>> tx = sr8.chain(sr8.clip_by_global_norm(1.0), sr8.adamw(1e-3))
    """
    if not transforms or not isinstance(transforms[-1], Transformation):
        raise ValueError(
            "the last link of sr8.chain must be an optimizer of optax_sr8bit, which rounds the new parameters; for "
            "chains without one use optax.chain"
        )
    early = [i for i, t in enumerate(transforms[:-1]) if isinstance(t, Transformation)]
    if early:
        raise ValueError(f"only the last link of sr8.chain may be an optimizer of optax_sr8bit; so are links {early}")
    links, last = [optax.with_extra_args_support(link) for link in transforms[:-1]], transforms[-1]
    # From here on nothing sees the gradients but their scales.
    fused = 1 + max((i for i, link in enumerate(transforms[:-1]) if not isinstance(link, GradientScale)), default=-1)

    def advance(
        door: Callable[..., Any], grads: Any, state: Any, params: Any, grad_scale: Any = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        if len(state) != len(transforms):
            raise ValueError(f"the state is of a chain of {len(state)} links, this one has {len(transforms)}")
        states, factor = [], inputs.scale(grad_scale)
        if fused and factor is not None:
            grads, factor = scaled(grads, factor), None
        for i, link in enumerate(links):
            if i < fused or not isinstance(link, GradientScale):
                grads, new = link.update(grads, state[i], params, **extra_args)
            else:
                factor, new = link.scale(grads, factor), state[i]
            states.append(new)
        result, new = door(grads, state[-1], params, grad_scale=factor, **extra_args)
        return result, (*states, new)

    def init(params: Any) -> Any:
        return tuple(link.init(params) for link in transforms)

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        return advance(last.update, updates, state, params, **extra_args)

    def step(grads: Any, state: Any, params: Any, **extra_args: Any) -> tuple[Any, Any]:
        return advance(last.step, grads, state, params, **extra_args)

    return Transformation(init, update, step, last.definition, last.options)


def inject_hyperparams(
    factory: Callable[..., Transformation], static_args: str | Iterable[str] = ()
) -> Callable[..., Transformation]:
    """`optax.inject_hyperparams` in float32, with structural arguments static and `step` kept.

    Args:
      factory: one of this library's optimizers, or a function of hyperparameters that returns one (or an `sr8.chain`).
      static_args: arguments that are no hyperparameters, beside the structural ones of this library's optimizers; also
        those that a transformation of Optax in the chain needs in the gradients' dtype (`clip_by_global_norm` does).

    Returns:
      A function with the factory's arguments, schedules allowed for all numbers. The state has the `hyperparams` that
      may be changed between steps.

    Example:
      >>> import jax.numpy as jnp, optax_sr8bit as sr8
      >>> tx = sr8.inject_hyperparams(sr8.adamw)(learning_rate=1e-3, b2=0.95)
      >>> state = tx.init({"w": jnp.ones((64, 128), jnp.bfloat16)})
      >>> state.hyperparams["learning_rate"] = jnp.float32(1e-4)
    """
    names = {static_args} if isinstance(static_args, str) else set(static_args)
    names |= STRUCTURAL & set(inspect.signature(factory).parameters)
    inject = functools.partial(optax.inject_hyperparams, static_args=names, hyperparam_dtype=jnp.float32)

    @functools.wraps(factory)
    def stepping(*args: Any, **kwargs: Any) -> optax.GradientTransformationExtraArgs:
        tx = factory(*args, **kwargs)
        return optax.GradientTransformationExtraArgs(tx.init, _as_update(tx))

    @functools.wraps(factory)
    def wrapped(*args: Any, **kwargs: Any) -> Transformation:
        tx = factory(*args, **kwargs)
        if not isinstance(tx, Transformation):
            raise ValueError(
                f"sr8.inject_hyperparams needs an optimizer of optax_sr8bit, {factory} returned a {type(tx).__name__}; "
                "use optax.inject_hyperparams"
            )
        return Transformation(
            *inject(factory)(*args, **kwargs), inject(stepping)(*args, **kwargs).update, tx.definition, tx.options
        )

    return wrapped


def _as_update(tx: Transformation) -> Callable[..., tuple[Any, Any]]:
    """`step` under the signature of `update`, params optional."""

    def update(grads: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        return tx.step(grads, state, params, **extra_args)

    return update
