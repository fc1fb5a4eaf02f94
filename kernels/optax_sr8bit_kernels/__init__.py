"""How a tile function runs on a device: knows no optimizer and no codec."""

from optax_sr8bit_kernels.xla import run_tile as run_tile
