"""What is trained: initial weights, batches, loss and validation, each a function of the seed."""

import dataclasses
import functools
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import corpus
from transformer import Transformer, loss as language_loss


@dataclasses.dataclass(frozen=True)
class Task:
    """A problem to train on.

    Attributes:
      optimizer: its name.
      tuned: the learning rate that was chosen for FP32 before the study.
      shape: of the learning rate over the run, as a function (step) -> factor of the peak.
      initial: (seed) -> FP32 weights.
      batches: (seed) -> an array whose leading axis is the steps.
      loss: (weights, batch) -> its mean, in nats.
      validate: (weights) -> the mean over the validation set, by name; "loss" in nats.
      text: CRC of the data, for tasks whose data depends on the versions of what is installed.
    """

    optimizer: str
    tuned: float
    shape: Callable[[Any], Any]
    initial: Callable[[int], Any]
    batches: Callable[[int], np.ndarray]
    loss: Callable[[Any, Any], jax.Array]
    validate: Callable[[Any], dict[str, float]]
    text: int


def decaying(steps: int, end: float) -> Callable[[Any], Any]:
    """A warm-up over the first twentieth, then a cosine down to `end` of the peak."""
    return optax.warmup_cosine_decay_schedule(0.0, 1.0, max(1, steps // 20), steps, end)


def constant(steps: int, end: float) -> Callable[[Any], Any]:
    return optax.constant_schedule(1.0)


SHAPES = {"decaying": decaying, "constant": constant}


def texts(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """(training, validation) bytes: "code" is the standard library's source, "prose" the language reference in it."""
    if kind == "code":
        return corpus.standard_library()
    import pydoc_data.topics  # 0.7 MB of reStructuredText

    return corpus.text_file(str(Path(pydoc_data.topics.__file__)))


def language(settings: dict[str, Any]) -> Task:
    """A byte-level transformer. On GPUs layers compute in BF16, on CPUs in FP32 from the stored weights."""
    compute = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    training, held_out = texts(settings["text"])
    size, length, steps = settings["batch"], settings["length"], settings["steps"]
    windows = corpus.validation_batches(held_out, settings["validation_batches"], size, length)

    def model(seed: int) -> Any:
        return Transformer(
            vocabulary=corpus.VOCABULARY,
            length=length,
            width=settings["width"],
            layers=settings["layers"],
            heads=settings["width"] // settings["head"],
            dtype=compute,
            param_dtype=jnp.float32,
            one_hot=jax.default_backend() != "cpu",
            rngs=nnx.Rngs(jax.random.key(seed)),
        )

    structure, _ = nnx.split(nnx.eval_shape(lambda: model(0)), nnx.Param)
    initial = nnx.jit(lambda seed: nnx.state(model(seed), nnx.Param))

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        return language_loss(nnx.merge(structure, params), batch)

    mean = jax.jit(lambda params: jax.lax.map(lambda part: loss(params, part), windows).mean())
    return Task(
        optimizer=settings["optimizer"],
        tuned=settings["tuned"],
        shape=SHAPES[settings["shape"]](steps, settings["end"]),
        initial=initial,
        batches=lambda seed: np.stack([corpus.batch(training, seed, step, size, length) for step in range(steps)]),
        loss=loss,
        validate=lambda params: {"loss": float(mean(params))},
        text=zlib.crc32(training.data),
    )


class Perceptron(nnx.Module):
    """Two hidden layers."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.first = nnx.Linear(64, width, rngs=rngs)
        self.second = nnx.Linear(width, width, rngs=rngs)
        self.head = nnx.Linear(width, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map images, (batch, 64), to logits, (batch, 10)."""
        return self.head(nnx.relu(self.second(nnx.relu(self.first(x)))))


def digits(settings: dict[str, Any]) -> Task:
    """The 1,797 images of 8×8 that scikit-learn ships; every third is validated."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    table = np.concatenate([images / 16, labels[:, None]], axis=1).astype(np.float32)
    held_out = np.arange(len(table)) % 3 == 0
    training, validation = table[~held_out], table[held_out]

    def model(seed: int) -> Perceptron:
        return Perceptron(settings["width"], nnx.Rngs(jax.random.key(seed)))

    structure, _ = nnx.split(nnx.eval_shape(lambda: model(0)), nnx.Param)

    def logits(params: Any, rows: jax.Array) -> jax.Array:
        # The layers compute in FP32 from the stored weights.
        wide = jax.tree.map(lambda p: p.astype(jnp.float32), params)
        return nnx.merge(structure, wide)(rows[:, :-1])

    def loss(params: Any, rows: jax.Array) -> jax.Array:
        labels = rows[:, -1].astype(jnp.int32)
        return optax.softmax_cross_entropy_with_integer_labels(logits(params, rows), labels).mean()

    @jax.jit
    def scores(params: Any) -> tuple[jax.Array, jax.Array]:
        right = logits(params, jnp.asarray(validation)).argmax(-1) == validation[:, -1].astype(np.int32)
        return loss(params, jnp.asarray(validation)), right.mean()

    def validate(params: Any) -> dict[str, float]:
        value, accuracy = scores(params)
        return {"loss": float(value), "accuracy": float(accuracy)}

    def batches(seed: int) -> np.ndarray:
        random = np.random.Generator(np.random.Philox(key=[seed, 0]))
        return training[random.integers(len(training), size=(settings["steps"], settings["batch"]))]

    return Task(
        optimizer=settings["optimizer"],
        tuned=settings["tuned"],
        shape=SHAPES[settings["shape"]](settings["steps"], settings["end"]),
        initial=nnx.jit(lambda seed: nnx.state(model(seed), nnx.Param)),
        batches=batches,
        loss=loss,
        validate=validate,
        text=zlib.crc32(table.tobytes()),
    )


MODELS = {"language": language, "digits": digits}


@functools.cache
def task(items: tuple[tuple[str, Any], ...]) -> Task:
    """The task of the registration's settings, given as items; one object for equal settings."""
    settings = dict(items)
    return MODELS[settings["model"]](settings)
