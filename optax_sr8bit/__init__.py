"""BF16 training in JAX with 8-bit optimizer moments and stochastic rounding."""

from optax_sr8bit import checkpoint as checkpoint, codecs as codecs, rounding as rounding
from optax_sr8bit.clipping import clip_by_global_norm as clip_by_global_norm, global_norm as global_norm
from optax_sr8bit.master import from_master as from_master, master_params as master_params
from optax_sr8bit.optimizers import *  # noqa: F403 -- one line there adds an optimizer
from optax_sr8bit.quantize import quantize_moments as quantize_moments
from optax_sr8bit.report import check as check, explain as explain
from optax_sr8bit.state_shardings import shardings as shardings
from optax_sr8bit.terminal import stochastic_round as stochastic_round
from optax_sr8bit.transform import Transformation as Transformation
from optax_sr8bit.wrappers import chain as chain, inject_hyperparams as inject_hyperparams

__version__ = "0.4.0"
