"""Adafactor in NumPy float64, one leaf, factored or not.

References:
  Shazeer and Stern, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost, ICML 2018. Optax has `lr`
  for the paper's relative step size, means of rows and columns where the paper has sums (the same second moment), a
  momentum of finished steps, and a weight decay that the learning rate does not scale.
"""

import numpy as np

from .adamw import at


def rms(x):
    """Root of the mean square of a leaf."""
    return np.sqrt(np.mean(x * x))


def adafactor(
    p,
    grads,
    lr=None,
    min_dim_size_to_factor=128,
    decay_rate=0.8,
    decay_offset=0,
    multiply_by_parameter_scale=True,
    clipping_threshold=1.0,
    momentum=None,
    weight_decay_rate=None,
    eps=1e-30,
    factored=True,
):
    """Yields the parameter after each step.

    Args:
      p: initial parameter, float64.
      grads: gradients, one a step.
      lr: learning rate, or a function of the number of steps taken before; None is 1.
      min_dim_size_to_factor: the least second longest dimension of a leaf whose second moment is factored.
      decay_rate: the second moment after t steps keeps 1 - t**-decay_rate of itself.
      decay_offset: taken off t; not above 0 for a fresh state.
      multiply_by_parameter_scale: whether the step is relative to the RMS of the parameter, of at least 1e-3.
      clipping_threshold: the largest RMS of an update before learning rate and scale, or None.
      momentum: decay of the mean update, uncorrected for its start, or None.
      weight_decay_rate: part of the parameter that a step takes away whatever the learning rate, a function of the
        number of steps taken before, or None.
      eps: added to the squared gradient.
      factored: whether long dimensions are factored at all.

    Yields:
      The parameter, float64.
    """
    p, m, v, rows, columns = np.array(p, np.float64), 0.0, 0.0, 0.0, 0.0
    # Of equally long dimensions the last.
    axes = np.argsort(p.shape, kind="stable")[-2:]
    factored = factored and p.ndim >= 2 and p.shape[axes[0]] >= min_dim_size_to_factor
    for t, g in enumerate(np.asarray(grads, np.float64)):
        keep = 1 - (t + 1 - decay_offset) ** -decay_rate
        square = g * g + eps
        if factored:
            columns = keep * columns + (1 - keep) * square.mean(axes[0], keepdims=True)
            rows = keep * rows + (1 - keep) * square.mean(axes[1], keepdims=True)
            v = rows * columns / rows.mean(axes[0], keepdims=True)
        else:
            v = keep * v + (1 - keep) * square
        u = g / np.sqrt(v)
        if clipping_threshold is not None:
            u = u / max(1.0, rms(u) / clipping_threshold)
        if lr is not None:
            u = at(lr, t) * u
        if multiply_by_parameter_scale:
            u = max(rms(p), 1e-3) * u
        if momentum is not None:
            m = momentum * m + (1 - momentum) * u
            u = m
        if weight_decay_rate is not None:
            u = u + at(weight_decay_rate, t) * p
        p = p - u
        yield p
