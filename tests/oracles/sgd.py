"""SGD with momentum in NumPy float64, one leaf.

References:
  Polyak, Some methods of speeding up the convergence of iteration methods, 1964; Sutskever et al., On the importance of
  initialization and momentum in deep learning, ICML 2013. Their velocity holds the learning rate; Optax's `sgd` sums
  bare gradients, so that a schedule also scales what was summed before. Their Nesterov form is written for the point
  where the gradient is taken, as usual in deep learning.
"""

import numpy as np

from .adamw import at


def accumulate(trace, u, momentum, nesterov):
    """The sum of updates after this one, and the update to apply; momentum None is none at all."""
    if momentum is None:
        return trace, u
    trace = momentum * trace + u
    return trace, momentum * trace + u if nesterov else trace


def sgd(p, grads, lr, momentum=None, nesterov=False):
    """Yields the parameter after each step.

    Args:
      p: initial parameter, float64.
      grads: gradients, one a step.
      lr: learning rate, or a function of the number of steps taken before.
      momentum: what remains of the sum of gradients after a step, or None.
      nesterov: whether the momentum looks ahead.

    Yields:
      The parameter, float64.
    """
    p, trace = np.array(p, np.float64), 0.0
    for t, g in enumerate(np.asarray(grads, np.float64)):
        trace, u = accumulate(trace, g, momentum, nesterov)
        p = p - at(lr, t) * u
        yield p
