"""Compiles programs for NVIDIA GPUs that are not there; needs JAX's CUDA plugin, no driver."""

import contextlib
import math

import jax
from jax.experimental import topologies

# Of an H200, as XLA keeps it in xla/backends/gpu/target_config/specs/h200.txtpb (openxla/xla).
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 151397597184
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability 9.0a"
  device_address_bits: 64
  pcie_bandwidth: 34359738368
  ecc_enabled: true
  name: "NVIDIA H200"
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
  collective_memory_granularity: 2097152
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H200"
"""


def mesh(shape, names, kind):
    """A mesh of so many absent GPUs, its axes of that `AxisType`."""
    topology = topologies.get_topology_desc(platform="cuda", target_config=H200, topology=f"1x1x{math.prod(shape)}")
    over = topologies.make_mesh(topo=topology, mesh_shape=shape, axis_names=names)
    return jax.sharding.Mesh(over.devices, names, axis_types=(kind,) * len(shape))


@contextlib.contextmanager
def absent(over):
    """Within it, kernels are compiled for the GPUs of the mesh."""
    with jax.sharding.use_abstract_mesh(over.abstract_mesh):
        yield
