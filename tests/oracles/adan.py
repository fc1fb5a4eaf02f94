"""Adan in NumPy float64, one leaf.

References:
  Xie et al., Adan: Adaptive Nesterov Momentum Algorithm for Faster Optimizing Deep Models, TPAMI 2024. With the paper's
  betas, 1 - b here, the difference of gradients is weighted by 1 - beta2, which is b2; Optax keeps the letters and
  weights it by 1 - b2: 0.08, not 0.92. The paper divides by 1 + lr weight_decay; Optax subtracts, as AdamW does. The
  correction of bias is that of the authors' code.
"""

import numpy as np

from .adamw import at


def adan(p, grads, lr, b1=0.98, b2=0.92, b3=0.99, eps=1e-8, eps_root=1e-8, weight_decay=0.0):
    """Yields the parameter after each step.

    Args:
      p: initial parameter, float64.
      grads: gradients, one a step.
      lr: learning rate, or a function of the number of steps taken before.
      b1: decay of the mean gradient.
      b2: decay of the mean difference of gradients, and 1 minus its weight.
      b3: decay of the second moment.
      eps: added outside the root.
      eps_root: added inside the root.
      weight_decay: weight decay, or a function of the number of steps taken before; from the parameter before the step.

    Yields:
      The parameter, float64.
    """
    p, m, v, n = np.array(p, np.float64), 0.0, 0.0, 0.0
    grads = np.asarray(grads, np.float64)
    before = grads[0]  # the first difference is zero
    for t, g in enumerate(grads):
        change, before = g - before, g
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * change
        n = b3 * n + (1 - b3) * (g + (1 - b2) * change) ** 2
        m_hat, v_hat, n_hat = (x / (1 - b ** (t + 1)) for x, b in ((m, b1), (v, b2), (n, b3)))
        u = (m_hat + (1 - b2) * v_hat) / (np.sqrt(n_hat + eps_root) + eps)
        p = p - at(lr, t) * (u + at(weight_decay, t) * p)
        yield p
