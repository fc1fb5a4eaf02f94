"""Train a byte-level transformer in BF16, with 8-bit moments and stochastic rounding.

Run it as one of:

    python examples/train_lm.py              # AdamW on the source of the Python standard library
    python examples/train_lm.py --compare    # beside FP32 and BF16 rounded to nearest: a table and a figure
    python examples/train_lm.py --optimizer lion --checkpoint runs/lion        # and, once interrupted,
    python examples/train_lm.py --optimizer lion --checkpoint runs/lion --resume
"""

import argparse
import contextlib
import functools
import time
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm

import comparison
import corpus
import optax_sr8bit as sr8
from checkpoints import Checkpoints
from options import TRAJECTORY, parse
from transformer import Transformer, loss


def build_model(args: argparse.Namespace) -> tuple[Any, Any]:
    """Return the model's structure and its BF16 parameters."""
    # XLA's matrix products on CPUs are much slower in BF16 than in FP32, so there the layers compute in FP32 from the
    # stored BF16 weights. What is stored, and what the optimizer sees, is BF16 either way.
    compute = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    model = Transformer(
        vocabulary=corpus.VOCABULARY,
        length=args.seq,
        width=args.width,
        layers=args.layers,
        heads=args.width // 32,
        dtype=compute,
        param_dtype=jnp.bfloat16,
        rngs=nnx.Rngs(args.seed),
    )
    return nnx.split(model, nnx.Param)


def schedule(rate: float, steps: int) -> optax.Schedule:
    """Return a warm-up over the first twentieth, then a cosine down to a tenth of the rate."""
    return optax.warmup_cosine_decay_schedule(0.0, rate, max(1, steps // 20), steps, 0.1 * rate)


def build_optimizer(args: argparse.Namespace, rate: float) -> Any:
    """Return the optimizer of the command line."""
    factory = getattr(sr8, args.optimizer)
    return factory(
        schedule(rate, args.steps),
        seed=args.seed,
        rounding=args.rounding,
        codec=args.codec,
        block_size=args.block_size,
    )


def training_batch(args: argparse.Namespace, text: np.ndarray, index: int) -> np.ndarray:
    """Return the windows of a step, the same however often and wherever they are asked for."""
    return corpus.batch(text, args.seed, index, args.batch, args.seq)


def compile_step(structure: Any, step: Any) -> Any:
    """Return one training step under jit, around an optimizer's `tx.step`.

    Donation lets the new parameters and moments take the memory of the old: nothing of their size is allocated.
    """

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params, state, windows):
        value, grads = jax.value_and_grad(lambda params: loss(nnx.merge(structure, params), windows))(params)
        params, state = step(grads, state, params)
        return params, state, value

    return train_step


def compile_validation(structure: Any, windows: np.ndarray | jax.Array) -> Any:
    """Return the mean loss over uint8[batches, batch, length + 1], as a function of the parameters."""

    @jax.jit
    def mean(params, windows):
        return jax.lax.map(lambda part: loss(nnx.merge(structure, params), part), windows).mean()

    return lambda params: float(mean(params, windows))


def start(args: argparse.Namespace, checkpoints: Checkpoints | None, params: Any, state: Any) -> tuple[int, Any, Any]:
    """Return (steps done, parameters, optimizer state): those given or, for a resumed run, the newest checkpoint's."""
    if not (checkpoints and args.resume):
        return 0, params, state
    done, params, state = checkpoints.restore(params, state)
    print(f"resumed after {done} of {args.steps} steps")
    return done, params, state


def fit(
    args: argparse.Namespace,
    step: Callable[..., Any],
    batch: Callable[[int], Any],
    validate: Callable[[Any], float],
    checkpoints: Checkpoints | None,
    done: int,
    params: Any,
    state: Any,
) -> tuple[Any, Any]:
    """Train on from what `done` steps have made, with a progress bar, validation and checkpoints.

    `step` maps (params, state, windows) to new ones and the loss; `batch` maps the index of a step to its windows.
    """
    tokens = args.batch * args.seq
    bar = tqdm(
        total=args.steps * tokens,
        initial=done * tokens,
        unit="tokens",
        unit_scale=True,
        disable=jax.process_index() > 0,  # of several processes one shows it
    )
    with bar:
        for index in range(done, args.steps):
            params, state, value = step(params, state, batch(index))
            done = index + 1
            bar.update(tokens)
            if done % 10 == 0:  # not every step: reading the loss waits for the device
                bar.set_postfix(step=done, loss=f"{value:.3f}")
            if done % max(1, args.steps // 5) == 0 and done < args.steps:
                bar.write(f"step {done:6d}   validation loss {validate(params):.4f}")
            if checkpoints and (done % args.checkpoint_every == 0 or done == args.steps):
                checkpoints.save(done, params, state)
    print(f"step {done:6d}   validation loss {validate(params):.4f} nats a byte")
    print(f"parameters and optimizer state: {comparison.bytes_per_parameter(params, state):.2f} bytes a parameter")
    return params, state


def train(
    args: argparse.Namespace, text: np.ndarray, validation: np.ndarray, checkpoints: Checkpoints | None
) -> tuple[Any, Any]:
    """Build model and optimizer, train; return parameters and optimizer state."""
    structure, params = build_model(args)
    tx = build_optimizer(args, args.lr[0])
    sr8.explain(tx, params)
    step = compile_step(structure, tx.step)
    batch = functools.partial(training_batch, args, text)
    validate = compile_validation(structure, validation)
    done, params, state = start(args, checkpoints, params, tx.init(params))
    return fit(args, step, batch, validate, checkpoints, done, params, state)


def compare(args: argparse.Namespace, text: np.ndarray, validation: np.ndarray) -> dict[str, list[comparison.Result]]:
    """Train the three arms at each learning rate; print the tables, draw the figure, return both's numbers."""
    structure, initial = build_model(args)
    validate = compile_validation(structure, validation)
    rule = getattr(optax, args.optimizer)
    moments = "FP32" if args.codec == "float32" else "8-bit"
    nearest = argparse.Namespace(**vars(args) | {"rounding": "nearest", "codec": "float32"})

    def arm(name, tx, dtype):
        params = jax.tree.map(lambda leaf: jnp.array(leaf, dtype, copy=True), initial)  # a copy: steps donate theirs
        step = getattr(tx, "step", None) or optax_step(tx)
        return comparison.Arm(name, compile_step(structure, step), params, tx.init(params))

    panels = {}
    for rate in args.lr:
        arms = [
            arm(f"FP32, optax.{args.optimizer}", rule(schedule(rate, args.steps)), jnp.float32),
            arm("BF16, nearest", build_optimizer(nearest, rate), jnp.bfloat16),
            arm(f"BF16, stochastic, {moments} moments", build_optimizer(args, rate), jnp.bfloat16),
        ]
        batches = (training_batch(args, text, index) for index in range(args.steps))
        title = f"learning rate {rate:g}"
        panels[title] = comparison.run(arms, batches, validate, title)
    for title, results in panels.items():
        print("\n" + comparison.table(results, title))
    leaves = jax.tree.leaves(jax.eval_shape(build_optimizer(args, args.lr[0]).init, initial).mu)
    fallback = [leaf.size for leaf in leaves if leaf.dtype == jnp.float32]
    size = sum(leaf.size for leaf in leaves)
    print(f"\n{len(fallback)} of {len(leaves)} leaves, {sum(fallback):,} of {size:,} parameters, keep FP32 moments.")
    comparison.figure(panels, args.compare)
    print(f"curves: {args.compare}")
    return panels


def settings(args: argparse.Namespace, text: np.ndarray) -> dict[str, Any]:
    """Return all that the bits of a run depend on, to be kept with its checkpoints."""
    return {name: getattr(args, name) for name in TRAJECTORY} | {"text (CRC)": zlib.crc32(text.data)}


def optax_step(tx: optax.GradientTransformation) -> Any:
    """Return `step` for a plain Optax optimizer."""

    def step(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def main(argv: list[str] | None = None) -> Any:
    """Run the command line; return (parameters, optimizer state), or with --compare the panels' results."""
    args, parser = parse(__doc__, argv)
    started = time.perf_counter()
    with contextlib.ExitStack() as stack:
        try:  # everything that can be wrong with the command line is found before any work
            build_optimizer(args, args.lr[0])
            text, held_out = corpus.read(args.data, args.seq)
            validation = corpus.validation_batches(held_out, 40, args.batch, args.seq)
            checkpoints = None
            if args.checkpoint:
                checkpoints = Checkpoints(args.checkpoint, settings(args, text), args.resume)
                stack.enter_context(contextlib.closing(checkpoints))
        except ValueError as error:
            parser.error(str(error))
        result = compare(args, text, validation) if args.compare else train(args, text, validation, checkpoints)
    print(f"{time.perf_counter() - started:.0f} s in total")
    return result


if __name__ == "__main__":
    main()
