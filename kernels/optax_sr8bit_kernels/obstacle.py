"""Why the Triton kernel cannot run here, if it cannot, and what its compiler has to know of the GPU."""

import functools
import importlib.metadata
import re
import sys

import jax

OLDEST = (0, 4, 1)  # of jax-triton: refs that update in place, calls that command buffers capture
CAPABILITY = (8, 0)  # of a GPU: bfloat16 arithmetic, minima and maxima that propagate NaN


@functools.cache
def triton_obstacle() -> str | None:
    """What keeps the Triton kernel from running on this machine's default GPU, in words; None where nothing does."""
    return _devices() or _packages()


def _devices() -> str | None:
    found = capabilities()
    if not found:
        return "JAX sees no CUDA GPU"
    if found[0] < CAPABILITY:
        return f"the GPU has compute capability {'.'.join(map(str, found[0]))}, the kernel needs 8.0"
    return None


def _packages() -> str | None:
    try:
        version = importlib.metadata.version("jax-triton")
    except importlib.metadata.PackageNotFoundError:
        if sys.version_info < (3, 12):
            return "jax-triton needs Python 3.12 or newer"
        return "jax-triton is not installed; pip install 'optax-sr8bit[gpu]'"
    if tuple(map(int, re.findall(r"\d+", version)[:3])) < OLDEST:
        return f"jax-triton {version} is older than {'.'.join(map(str, OLDEST))}; pip install -U jax-triton"
    try:
        import jax_triton  # noqa: F401  # pyright: ignore[reportMissingImports]
    except Exception as error:  # whatever an optional package raises, XLA can run the step
        return f"jax-triton cannot be imported: {type(error).__name__}: {error}"
    return None


def capabilities() -> list[tuple[int, ...]]:
    """The compute capabilities of this machine's CUDA GPUs, ascending."""
    try:
        devices = jax.devices("cuda")
    except RuntimeError:
        return []
    return sorted({tuple(map(int, str(device.compute_capability).split("."))) for device in devices})


def ptx_version() -> int | None:
    """The version of PTX to emit, times ten, or None for Triton's choice.

    Triton writes the newest version that its own assembler takes, while XLA assembles with whichever `ptxas` it finds;
    8.7 is that of CUDA 12.8 and knows all GPUs up to compute capability 10.0, and 12.0.
    """
    newer = [c for c in capabilities() if c > (10, 0) and c != (12, 0)]
    return None if newer else 87
