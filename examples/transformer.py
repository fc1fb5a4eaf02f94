"""A small decoder-only transformer over bytes, in Flax NNX."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx


class Block(nnx.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, width: int, heads: int, *, dtype, param_dtype, rngs: nnx.Rngs):
        kind: dict[str, Any] = dict(use_bias=False, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.heads = heads
        self.norm_attention = nnx.RMSNorm(width, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.query_key_value = nnx.Linear(width, 3 * width, **kind)
        self.projection = nnx.Linear(width, width, **kind)
        self.norm_mlp = nnx.RMSNorm(width, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, **kind)
        self.down = nnx.Linear(4 * width, width, **kind)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map the residual stream, (batch, length, width), to itself."""
        batch, length, width = x.shape
        heads = self.query_key_value(self.norm_attention(x)).reshape(batch, length, 3, self.heads, width // self.heads)
        mixed = jax.nn.dot_product_attention(heads[:, :, 0], heads[:, :, 1], heads[:, :, 2], is_causal=True)
        x = x + self.projection(mixed.reshape(batch, length, width))
        return x + self.down(jax.nn.gelu(self.up(self.norm_mlp(x))))


class Transformer(nnx.Module):
    """Token and position embeddings, blocks, a final norm and a head.

    ``param_dtype`` is what is stored and what the optimizer sees; ``dtype`` is what the layers compute in. ``one_hot``
    looks tokens up by a product: GPUs add the rows of a lookup's gradient one after the other where tokens repeat.
    """

    def __init__(
        self,
        *,
        vocabulary: int,
        length: int,
        width: int,
        layers: int,
        heads: int,
        dtype,
        param_dtype,
        rngs: nnx.Rngs,
        one_hot: bool = False,
    ):
        self.one_hot = one_hot
        kind: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.tokens = nnx.Embed(vocabulary, width, **kind)
        self.positions = nnx.Embed(length, width, **kind)
        self.blocks = nnx.List([Block(width, heads, **kind) for _ in range(layers)])
        self.norm = nnx.RMSNorm(width, **kind)
        self.head = nnx.Linear(width, vocabulary, use_bias=False, **kind)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Map tokens, integers (batch, length), to logits, (batch, length, vocabulary)."""
        if self.one_hot:
            table = self.tokens.embedding[...].astype(self.tokens.dtype)
            x = jax.nn.one_hot(tokens, len(table), dtype=table.dtype) @ table
        else:
            x = self.tokens(tokens)
        x = x + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss(model: nnx.Module, windows: jax.Array) -> jax.Array:
    """Return the mean cross entropy, in nats a byte, over the windows, uint8[batch, length + 1]."""
    windows = windows.astype(jnp.int32)
    logits = model(windows[:, :-1]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()
