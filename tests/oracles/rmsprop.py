"""RMSProp and Adagrad in NumPy float64, one leaf.

References:
  Hinton, Neural Networks for Machine Learning, lecture 6e, 2012; Graves, Generating Sequences With Recurrent Neural
  Networks, 2013 (centered, with momentum; there eps is inside the root); Duchi et al., Adaptive Subgradient Methods for
  Online Learning and Stochastic Optimization, JMLR 2011 (there eps is added outside the root, and the sum starts at 0).
"""

import numpy as np

from .adamw import at
from .sgd import accumulate


def rmsprop(
    p,
    grads,
    lr,
    decay=0.9,
    eps=1e-8,
    initial_scale=0.0,
    eps_in_sqrt=True,
    centered=False,
    momentum=None,
    nesterov=False,
    bias_correction=False,
):
    """Yields the parameter after each step.

    Args:
      p: initial parameter, float64.
      grads: gradients, one a step.
      lr: learning rate, or a function of the number of steps taken before; scales an update before the momentum.
      decay: decay of both moments.
      eps: added to the variance or to its root.
      initial_scale: second moment before the first step; the bias correction takes it for zero.
      eps_in_sqrt: whether eps is inside the root.
      centered: whether the square of the mean is taken off the second moment.
      momentum: what remains of the sum of updates after a step, or None.
      nesterov: whether the momentum looks ahead.
      bias_correction: whether the moments are corrected for their start.

    Yields:
      The parameter, float64.
    """
    p, trace, m, v = np.array(p, np.float64), 0.0, 0.0, initial_scale
    for t, g in enumerate(np.asarray(grads, np.float64)):
        m = decay * m + (1 - decay) * g
        v = decay * v + (1 - decay) * g * g
        seen = 1 - decay ** (t + 1) if bias_correction else 1.0
        variance = v / seen - (m / seen) ** 2 if centered else v / seen
        u = g / np.sqrt(variance + eps) if eps_in_sqrt else g / (np.sqrt(variance) + eps)
        trace, u = accumulate(trace, at(lr, t) * u, momentum, nesterov)
        p = p - u
        yield p


def adagrad(p, grads, lr, initial_accumulator_value=0.1, eps=1e-7):
    """Yields the parameter after each step; eps is inside the root, and no gradient so far means no update."""
    p = np.array(p, np.float64)
    total = np.full_like(p, initial_accumulator_value)
    for t, g in enumerate(np.asarray(grads, np.float64)):
        total = total + g * g
        some = total > 0
        p = p - at(lr, t) * np.where(some, g / np.sqrt(np.where(some, total + eps, 1.0)), 0.0)
        yield p
