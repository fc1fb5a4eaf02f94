"""NAdam and NAdamW: Adam and AdamW that look ahead."""

import functools

from optax_sr8bit.optimizers.adam import adam, adamw

nadam = functools.partial(adam, nesterov=True)
nadam.__doc__ = """NAdam: `adam` with `nesterov=True`.

References:
  Dozat, Incorporating Nesterov Momentum into Adam, 2016
"""
nadamw = functools.partial(adamw, nesterov=True)
nadamw.__doc__ = """NAdamW: `adamw` with `nesterov=True`.

References:
  Dozat, Incorporating Nesterov Momentum into Adam, 2016; Loshchilov and Hutter, Decoupled Weight Decay Regularization,
  2019, https://arxiv.org/abs/1711.05101
"""
