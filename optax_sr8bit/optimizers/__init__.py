"""The optimizers, one a file; all public names here are public names of the package."""

from optax_sr8bit.optimizers.adam import AdamState as AdamState
from optax_sr8bit.optimizers.adam import adam as adam
from optax_sr8bit.optimizers.adam import adamw as adamw
from optax_sr8bit.optimizers.lion import LionState as LionState
from optax_sr8bit.optimizers.lion import lion as lion
