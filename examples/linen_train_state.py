"""The same idea in Flax Linen: a `TrainState` whose loop stays as it is, with the optimizer's line changed.

`TrainState.apply_gradients` calls `tx.update` and `optax.apply_updates` itself. With `in_place=True` the updates are
the new parameters on their way there: nothing is rounded twice, and no second pass over memory is made.

Run it with `python examples/linen_train_state.py`.
"""

import argparse
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from tqdm import tqdm

import corpus
import optax_sr8bit as sr8

BATCH, LENGTH, WIDTH = 16, 32, 128


class LanguageModel(nn.Module):
    """One causal attention block over bytes; BF16 parameters, FP32 compute (which is the faster one on CPUs)."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Map tokens, integers (batch, length), to logits, (batch, length, 256)."""
        kind: dict[str, Any] = dict(dtype=jnp.float32, param_dtype=jnp.bfloat16)
        dense = functools.partial(nn.Dense, use_bias=False, **kind)
        positions = nn.Embed(LENGTH, WIDTH, name="positions", **kind)(jnp.arange(tokens.shape[1]))
        x = nn.Embed(corpus.VOCABULARY, WIDTH, name="tokens", **kind)(tokens) + positions
        attention = nn.MultiHeadDotProductAttention(num_heads=4, use_bias=False, name="attention", **kind)
        x = x + attention(nn.RMSNorm(**kind)(x), mask=nn.make_causal_mask(tokens))
        x = x + dense(WIDTH, name="down")(nn.gelu(dense(4 * WIDTH, name="up")(nn.RMSNorm(**kind)(x))))
        return dense(corpus.VOCABULARY, name="head")(nn.RMSNorm(**kind)(x))


def loss(apply, params, windows: jax.Array) -> jax.Array:
    """Return the mean cross entropy, in nats a byte, over uint8[batch, length + 1]."""
    windows = windows.astype(jnp.int32)
    logits = apply({"params": params}, windows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()


@functools.partial(jax.jit, donate_argnums=0)
def train_step(state: TrainState, windows: jax.Array) -> tuple[TrainState, jax.Array]:
    """Take one step. Update and application share one jit, as `in_place=True` asks."""
    value, grads = jax.value_and_grad(functools.partial(loss, state.apply_fn))(state.params, windows)
    return state.apply_gradients(grads=grads), value


def main(argv: list[str] | None = None) -> tuple[float, float]:
    """Train; return the validation loss before and after."""
    parser = argparse.ArgumentParser(description="Train a byte-level model with Flax Linen's TrainState in BF16.")
    parser.add_argument("--steps", type=int, default=300, metavar="N", help="training steps (300)")
    parser.add_argument("--lr", type=float, default=3e-3, metavar="RATE", help="learning rate (0.003)")
    parser.add_argument("--data", metavar="FILE", help="text to train on (the Python standard library's source)")
    args = parser.parse_args(argv)
    if args.steps < 1:
        parser.error(f"--steps must be at least 1, got {args.steps}")

    try:
        text, validation = corpus.read(args.data, LENGTH)
    except ValueError as error:
        parser.error(str(error))
    model = LanguageModel()
    params = model.init(jax.random.key(0), jnp.zeros((1, LENGTH), jnp.int32))["params"]
    tx = sr8.adamw(args.lr, in_place=True)  # was optax.adamw(args.lr)
    sr8.explain(tx, params)
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    held_out = corpus.validation_batches(validation, 1, 256, LENGTH)[0]
    validate = jax.jit(functools.partial(loss, model.apply))
    before = float(validate(state.params, held_out))
    bar = tqdm(range(args.steps), unit="steps")
    for step in bar:
        state, value = train_step(state, corpus.batch(text, 0, step, BATCH, LENGTH))
        if step % 10 == 0:
            bar.set_postfix(loss=f"{value:.3f}")
    after = float(validate(state.params, held_out))
    print(f"validation loss {before:.3f} -> {after:.3f} nats a byte after {args.steps} steps")
    return before, after


if __name__ == "__main__":
    main()
