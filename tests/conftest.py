"""Eight virtual CPU devices for the tests of replicas and meshes; must be set before JAX starts its back end."""

import jax

jax.config.update("jax_num_cpu_devices", 8)
