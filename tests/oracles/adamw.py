"""AdamW and Lion in NumPy float64, one leaf, all moments exact to double precision.

References:
  Loshchilov and Hutter, Decoupled Weight Decay Regularization, ICLR 2019; Dozat, Incorporating Nesterov Momentum into
  Adam, 2016 (in Optax's form); Chen et al., Symbolic Discovery of Optimization Algorithms, 2023.
"""

import numpy as np


def single(x) -> float:
    """A hyperparameter as a float32 optimizer sees it."""
    return float(np.float32(x))


def direction(m, v, g, t, b1, b2, eps, eps_root=0.0, nesterov=False):
    """Adam's update direction from the moments after step t (t = 1 is the first)."""
    if nesterov:
        m_hat = b1 * m / (1 - b1 ** (t + 1)) + (1 - b1) * g / (1 - b1**t)
    else:
        m_hat = m / (1 - b1**t)
    return m_hat / (np.sqrt(v / (1 - b2**t) + eps_root) + eps)


def adamw(p, grads, lr, b1=0.9, b2=0.999, eps=1e-8, eps_root=0.0, decay=1e-4, nesterov=False):
    """Yields the parameter after each step.

    Args:
      p: initial parameter, float64.
      grads: gradients, one a step.
      lr: learning rate, or a function of the number of steps taken before.
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added outside the root.
      eps_root: added inside the root.
      decay: weight decay, or a function of the number of steps taken before; from the parameter before the step.
      nesterov: whether the momentum looks ahead.

    Yields:
      The parameter, float64.
    """
    p, m, v = np.array(p, np.float64), 0.0, 0.0
    for t, g in enumerate(np.asarray(grads, np.float64), start=1):
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g * g
        u = direction(m, v, g, t, b1, b2, eps, eps_root, nesterov)
        p = p - at(lr, t - 1) * (u + at(decay, t - 1) * p)
        yield p


def lion(p, grads, lr, b1=0.9, b2=0.99, decay=1e-3):
    """Yields the parameter after each step of Lion; arguments as for `adamw`, b1 blends and b2 remembers."""
    p, m = np.array(p, np.float64), 0.0
    for t, g in enumerate(np.asarray(grads, np.float64)):
        c = b1 * m + (1 - b1) * g
        p = p - at(lr, t) * (np.sign(c) + at(decay, t) * p)
        m = b2 * m + (1 - b2) * g
        yield p


def at(value, step):
    """A constant, or a schedule at a step."""
    return value(step) if callable(value) else value
