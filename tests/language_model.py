"""A recorded training run: gradients of a small byte-level language model on real text, for replays."""

import functools
import inspect
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax

VOCABULARY, CONTEXT, EMBEDDING, HIDDEN, BATCH = 256, 8, 32, 64, 128


def corpus() -> np.ndarray:
    """Bytes of a module of the standard library."""
    return np.frombuffer(inspect.getsource(textwrap).encode(), np.uint8)


def initial() -> dict[str, np.ndarray]:
    """Parameters in float32; two leaves keep float32 moments, three are large enough for 8 bits."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)

    return {
        "embedding": normal(VOCABULARY, EMBEDDING),
        "hidden": normal(CONTEXT * EMBEDDING, HIDDEN),
        "bias": np.zeros(HIDDEN, np.float32),
        "head": normal(HIDDEN, VOCABULARY),
        "head_bias": np.zeros(VOCABULARY, np.float32),
    }


def loss(params, inputs, targets):
    """Mean cross-entropy in nats of the next byte given CONTEXT bytes."""
    h = params["embedding"][inputs].reshape(inputs.shape[0], -1)
    h = jax.nn.gelu(h @ params["hidden"] + params["bias"][None])
    logits = h @ params["head"] + params["head_bias"][None]
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


@functools.cache
def recorded_run(steps: int, learning_rate: float = 2e-3):
    """Trains with Optax's AdamW in float32; returns (losses [steps], gradients: tree of float32 [steps, ...])."""
    text = corpus()
    starts = np.random.default_rng(1).integers(0, len(text) - CONTEXT - 1, (steps, BATCH))
    windows = text[starts[..., None] + np.arange(CONTEXT + 1)].astype(np.int32)
    tx = optax.adamw(learning_rate)

    @jax.jit
    def train(params, windows):
        def step(carry, window):
            params, state = carry
            value, grads = jax.value_and_grad(loss)(params, window[:, :-1], window[:, -1])
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), (value, grads)

        return jax.lax.scan(step, (params, tx.init(params)), windows)[1]

    with jax.numpy_dtype_promotion("standard"):  # Optax's AdamW needs it
        losses, grads = train(jax.tree.map(jnp.asarray, initial()), windows)
    return np.asarray(losses), jax.tree.map(np.asarray, grads)
