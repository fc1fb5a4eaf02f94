"""LARS and LAMB in NumPy float64, one leaf: the norm of the leaf sets the length of its step.

References:
  You et al., Large Batch Training of Convolutional Networks, 2017. Its ratio divides by the sum of the norms of
  gradient and decay, Optax's by the norm of their sum.
  You et al., Large Batch Optimization for Deep Learning: Training BERT in 76 minutes, ICLR 2020. Its bounded norm phi
  of the parameter is in Optax the norm itself.
"""

import numpy as np

from .adamw import at, direction
from .sgd import accumulate


def trust_ratio(p, u, eps=0.0):
    """|p| / (|u| + eps) by Euclidean norms, or None where either is 0: then the update stays, without coefficient."""
    p_norm, u_norm = np.sqrt(np.sum(p * p)), np.sqrt(np.sum(u * u))
    return p_norm / (u_norm + eps) if p_norm > 0 and u_norm > 0 else None


def lars(p, grads, lr, weight_decay=0.0, trust_coefficient=0.001, eps=0.0, momentum=0.9, nesterov=False):
    """Yields the parameter after each step.

    Args:
      p: initial parameter, float64.
      grads: gradients, one a step.
      lr: learning rate, or a function of the number of steps taken before; scales an update before the momentum.
      weight_decay: of the gradient, so part of the norm; or a function of the number of steps taken before.
      trust_coefficient: the ratio of step and parameter for a learning rate of 1.
      eps: added to the norm of the gradient.
      momentum: what remains of the sum of updates after a step.
      nesterov: whether the momentum looks ahead.

    Yields:
      The parameter, float64.
    """
    p, trace = np.array(p, np.float64), 0.0
    for t, g in enumerate(np.asarray(grads, np.float64)):
        u = g + at(weight_decay, t) * p
        ratio = trust_ratio(p, u, eps)
        u = u if ratio is None else trust_coefficient * ratio * u
        trace, u = accumulate(trace, at(lr, t) * u, momentum, nesterov)
        p = p - u
        yield p


def lamb(p, grads, lr, b1=0.9, b2=0.999, eps=1e-6, eps_root=0.0, weight_decay=0.0):
    """Yields the parameter after each step: AdamW's, to the length of the parameter; arguments as for `adamw`."""
    p, m, v = np.array(p, np.float64), 0.0, 0.0
    for t, g in enumerate(np.asarray(grads, np.float64), start=1):
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g * g
        u = direction(m, v, g, t, b1, b2, eps, eps_root) + at(weight_decay, t - 1) * p
        ratio = trust_ratio(p, u)
        p = p - at(lr, t - 1) * (u if ratio is None else ratio * u)
        yield p
