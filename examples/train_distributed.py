"""Train the model of train_lm.py with parameters and optimizer state sharded over the devices of several processes.

Run it as one of:

    python examples/train_distributed.py                  # one process, all its devices
    python examples/train_distributed.py --devices 2      # one process with two CPU devices
    python examples/train_distributed.py --processes 2    # two processes with one CPU device each: the same bits
    python examples/train_distributed.py --processes 8 --coordinator HOST:PORT --process-id 3

The last is one of 8 processes on a cluster; HOST is where process 0 runs.

Each device holds a part of every parameter and moment (FSDP): the leading axis is split where it divides, and batches
are split over the devices too. The last line printed is a checksum of all bits of parameters and state.
"""

import argparse
import contextlib
import functools
import os
import sys
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

import corpus
import local_workers
import optax_sr8bit as sr8
import options
import train_lm
from checkpoints import Checkpoints
from transformer import loss

HEARTBEAT_SECONDS = 10
"""A process not heard of for this long is given up, and all others end. JAX's own 100 s suit networks that stall."""


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    """Return the options, checked, and the parser, to report later errors with."""
    parser = options.training_parser(__doc__)
    add = parser.add_argument
    add("--processes", type=int, metavar="N", help="processes in all: started here, on CPUs, without --coordinator")
    add("--devices", type=int, metavar="N", help="CPU devices a process, in place of what JAX finds")
    add("--coordinator", metavar="HOST:PORT", help="be one of the --processes: where the one with id 0 listens")
    add("--process-id", type=int, metavar="K", help="with --coordinator: which of them, from 0")
    args = parser.parse_args(argv)
    options.check(args, parser)
    for name in ("devices", "processes"):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name} must be at least 1, got {value}")
    if args.coordinator:
        if not args.processes or args.process_id is None:
            parser.error("--coordinator needs --processes and --process-id")
        if not 0 <= args.process_id < args.processes:
            parser.error(f"--process-id must be from 0 to {args.processes - 1}, got {args.process_id}")
    elif args.process_id is not None:
        parser.error("--process-id needs --coordinator")
    return args, parser


def connect(args: argparse.Namespace) -> None:
    """Choose the devices and meet the other processes; before anything else that needs JAX's devices."""
    if args.devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.devices)
    if args.coordinator:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")  # how processes talk where devices are CPUs
        jax.distributed.initialize(
            args.coordinator,
            args.processes,
            args.process_id,
            initialization_timeout=60,  # for all to arrive
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=HEARTBEAT_SECONDS,  # at the end, or after an error, for the others to arrive too
        )


def over_leading_axis(mesh: jax.sharding.Mesh, leaf: Any) -> NamedSharding:
    """Return the sharding of a parameter: its leading axis over all devices where it divides, else a copy on each."""
    divides = leaf.ndim > 0 and leaf.shape[0] % mesh.size == 0
    return NamedSharding(mesh, PartitionSpec("devices") if divides else PartitionSpec())


def place(mesh: jax.sharding.Mesh, windows: np.ndarray, spec: PartitionSpec) -> jax.Array:
    """Return one array over all processes of what each holds as a whole; the devices get their parts."""
    return jax.make_array_from_callback(windows.shape, NamedSharding(mesh, spec), lambda part: windows[part])


def compile_step(structure: Any, tx: Any, mesh: jax.sharding.Mesh, shardings: tuple[Any, Any]) -> Any:
    """Return one training step under jit, over uint8[devices, batch / devices, length + 1].

    A plain mean over the batch would leave the order in which devices are added to whatever library does it, and the
    last bits would depend on where the processes begin. Here each device takes the gradient of its own windows, they
    exchange parts (as many bytes as a reduce-scatter sends), and each adds its parts in the order of the devices.
    """
    whole = NamedSharding(mesh, PartitionSpec())

    def exchanged(sharding: NamedSharding) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(None, *sharding.spec))

    @functools.partial(jax.jit, donate_argnums=(0, 1), out_shardings=(*shardings, whole))
    def train_step(params, state, windows):
        gathered = jax.lax.with_sharding_constraint(params, whole)
        gradient = jax.value_and_grad(lambda params, windows: loss(nnx.merge(structure, params), windows))
        values, grads = jax.vmap(gradient, in_axes=(None, 0))(gathered, windows)
        grads = jax.lax.with_sharding_constraint(grads, jax.tree.map(exchanged, shardings[0]))
        grads = jax.tree.map(lambda parts: parts.astype(jnp.float32).mean(0), grads)
        params, state = tx.step(grads, state, params)
        return params, state, jax.lax.with_sharding_constraint(values, whole).mean()

    return train_step


def train(
    args: argparse.Namespace, text: np.ndarray, validation: np.ndarray, checkpoints: Checkpoints | None
) -> tuple[Any, Any]:
    """Train on all devices of all processes; return parameters and optimizer state."""
    mesh = jax.make_mesh((jax.device_count(),), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))
    tx = train_lm.build_optimizer(args, args.lr[0])

    # Parameters and state are made where they belong: nowhere is there a whole one.
    structure, shapes = jax.eval_shape(lambda: train_lm.build_model(args))
    placed = jax.tree.map(lambda leaf: over_leading_axis(mesh, leaf), shapes)
    params = jax.jit(lambda: train_lm.build_model(args)[1], out_shardings=placed)()
    state_placed = sr8.shardings(tx, params)
    state = jax.jit(tx.init, out_shardings=state_placed)(params)
    sr8.explain(tx, params)

    def batch(index: int) -> jax.Array:
        windows = train_lm.training_batch(args, text, index)
        return place(mesh, windows.reshape(mesh.size, -1, args.seq + 1), PartitionSpec("devices"))

    step = compile_step(structure, tx, mesh, (placed, state_placed))
    validate = train_lm.compile_validation(structure, place(mesh, validation, PartitionSpec(None, "devices")))
    done, params, state = train_lm.start(args, checkpoints, params, state)
    params, state = train_lm.fit(args, step, batch, validate, checkpoints, done, params, state)
    print(f"checksum of parameters and optimizer state: {checksum((params, state)):08x}")
    return params, state


def checksum(tree: Any) -> int:
    """Return a CRC of all bits, whole leaves one after the other, the same on every process."""
    result = 0
    for leaf in jax.tree.leaves(tree):
        result = zlib.crc32(np.asarray(multihost_utils.process_allgather(leaf, tiled=True)).tobytes(), result)
    return result


def main(argv: list[str] | None = None) -> Any:
    """Run the command line; return (parameters, optimizer state), of whose arrays this process holds a part."""
    args, parser = parse(argv)
    if args.processes and not args.coordinator:
        sys.exit(local_workers.run(__file__, argv, args.processes, args.devices or 1))
    with contextlib.ExitStack() as stack:
        try:  # everything that can be wrong with the command line is found before any work
            train_lm.build_optimizer(args, args.lr[0])
            text, held_out = corpus.read(args.data, args.seq)
            validation = corpus.validation_batches(held_out, 40, args.batch, args.seq)
            connect(args)
            if args.batch % jax.device_count():
                raise ValueError(f"--batch must be a multiple of the {jax.device_count()} devices, got {args.batch}")
            if jax.process_index() > 0:  # all processes would print the same
                stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
            checkpoints = None
            if args.checkpoint:
                settings = train_lm.settings(args, text) | {"devices": jax.device_count()}
                checkpoints = Checkpoints(args.checkpoint, settings, args.resume)
                stack.enter_context(contextlib.closing(checkpoints))
        except ValueError as error:
            parser.error(str(error))
        return train(args, text, validation, checkpoints)


if __name__ == "__main__":
    main()
