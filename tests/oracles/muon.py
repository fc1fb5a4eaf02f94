"""Muon in NumPy float64, one matrix; the Newton-Schulz iteration acts on the singular values, without matrix products.

References:
  Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024 (momentum is a sum there, a mean with
  Nesterov's correction of bias in Optax: the length is normalized away, the mixture with the gradient is not);
  Liu et al., Muon is Scalable for LLM Training, 2025 (`consistent_rms`); Bernstein and Newhouse, Old Optimizer, New
  Norm: An Anthology, 2024 (`adaptive`); Boissin et al., Turbo-Muon, 2025 (`aol`); Grishina et al., Accelerating
  Newton-Schulz Iteration for Orthogonalization via Chebyshev-type Polynomials, 2025 (`schatten`).
"""

import numpy as np

from .adamw import at

TINY = 1e-8  # Optax's own floor of `aol` and `schatten`, whatever eps is


def orthogonalized(x, ns_coeffs, ns_steps, eps, preconditioning):
    """A matrix with its singular values moved towards one."""
    if preconditioning == "aol":
        # Of the shorter side's vectors, the longer each and the more parallel, the smaller.
        wide = x.shape[0] <= x.shape[1]
        likeness = np.abs(x @ x.T if wide else x.T @ x).sum(0)
        scale = 1 / np.sqrt(np.maximum(likeness, TINY))
        x = x * (scale[:, None] if wide else scale)
    left, s, right = np.linalg.svd(x, full_matrices=False)
    if preconditioning == "frobenius":
        s = s / (np.sqrt(np.sum(s**2)) + eps)
    elif preconditioning == "spectral":
        s = s / (s.max() + eps)
    elif preconditioning == "schatten":
        s = s / np.sqrt(max(np.sqrt(np.sum(s**4)), TINY))
    # One triple for every step, or one triple a step.
    coeffs = np.asarray(ns_coeffs, np.float64)
    for a, b, c in coeffs if coeffs.ndim == 2 else [coeffs] * ns_steps:
        s = a * s + b * s**3 + c * s**5
    return left * s @ right


def muon(
    p,
    grads,
    lr,
    ns_coeffs=(3.4445, -4.7750, 2.0315),
    ns_steps=5,
    beta=0.95,
    eps=1e-8,
    weight_decay=0.0,
    nesterov=True,
    adaptive=False,
    preconditioning="frobenius",
    consistent_rms=None,
):
    """Yields the parameter after each step.

    Args:
      p: initial parameter, float64, a matrix of inputs by outputs.
      grads: gradients, one a step.
      lr: learning rate, or a function of the number of steps taken before.
      ns_coeffs: coefficients of s, s**3 and s**5 in a Newton-Schulz step; of all steps, or of each.
      ns_steps: number of Newton-Schulz steps where all are alike.
      beta: decay of the mean gradient.
      eps: added to the norm.
      weight_decay: weight decay, or a function of the number of steps taken before; from the parameter before the step.
      nesterov: whether the momentum looks ahead.
      adaptive: whether the update is also multiplied by the nuclear norm of the momentum, about.
      preconditioning: by what the matrix is divided first: frobenius, spectral, schatten or aol.
      consistent_rms: a number multiplies the update, as does the root of the longer side; with None the update of a
        wide matrix is multiplied by sqrt(outputs / inputs).

    Yields:
      The parameter, float64.
    """
    p, m = np.array(p, np.float64), 0.0
    inputs, outputs = p.shape
    if consistent_rms is None:
        length = np.sqrt(max(1, outputs / inputs))
    else:
        length = consistent_rms * np.sqrt(max(inputs, outputs))
    for t, g in enumerate(np.asarray(grads, np.float64), start=1):
        m = beta * m + (1 - beta) * g
        if nesterov:
            m_hat = beta * m / (1 - beta ** (t + 1)) + (1 - beta) * g / (1 - beta**t)
        else:
            m_hat = m / (1 - beta**t)
        u = orthogonalized(m_hat, ns_coeffs, ns_steps, eps, preconditioning)
        if adaptive:
            u = np.sum(m_hat * u) * u
        p = p - at(lr, t - 1) * (length * u + at(weight_decay, t - 1) * p)
        yield p
