"""AdEMAMix in NumPy float64, one leaf.

References:
  Pagliardini et al., The AdEMAMix Optimizer: Better, Faster, Older, 2024. Its schedulers of alpha and b3 count from 1,
  Optax's from 0.
"""

import numpy as np

from .adamw import at


def ademamix(p, grads, lr, b1=0.9, b2=0.999, b3=0.9999, alpha=5.0, eps=1e-8, eps_root=0.0, weight_decay=0.0):
    """Yields the parameter after each step.

    Args:
      p: initial parameter, float64.
      grads: gradients, one a step.
      lr: learning rate, or a function of the number of steps taken before, as are b3, alpha and weight_decay.
      b1: decay of the fast mean.
      b2: decay of the second moment.
      b3: decay of the slow mean, whose bias is not corrected.
      alpha: weight of the slow mean.
      eps: added outside the root.
      eps_root: added inside the root.
      weight_decay: weight decay, from the parameter before the step.

    Yields:
      The parameter, float64.
    """
    p, fast, slow, v = np.array(p, np.float64), 0.0, 0.0, 0.0
    for t, g in enumerate(np.asarray(grads, np.float64)):
        keep = at(b3, t)
        fast = b1 * fast + (1 - b1) * g
        slow = keep * slow + (1 - keep) * g
        v = b2 * v + (1 - b2) * g * g
        fast_hat, v_hat = fast / (1 - b1 ** (t + 1)), v / (1 - b2 ** (t + 1))
        u = (fast_hat + at(alpha, t) * slow) / (np.sqrt(v_hat + eps_root) + eps)
        p = p - at(lr, t) * (u + at(weight_decay, t) * p)
        yield p
