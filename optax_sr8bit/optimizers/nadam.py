"""NAdam and NAdamW: Adam and AdamW that look ahead."""

import functools

from optax_sr8bit.optimizers.adam import adam, adamw

nadam = functools.partial(adam, nesterov=True)
nadamw = functools.partial(adamw, nesterov=True)
