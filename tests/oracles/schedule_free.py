"""Schedule-free AdamW in NumPy float64, one leaf.

References:
  Defazio et al., The Road Less Scheduled, NeurIPS 2024. The paper's learning rate holds the correction of the second
  moment's bias, also in the weights of the mean; Optax corrects the second moment alone, and weights by the largest
  learning rate so far. Optax reads that one step ahead of the learning rate of the step itself.
"""

import numpy as np

from .adamw import at


def schedule_free_adamw(
    p,
    grads,
    lr=0.0025,
    warmup_steps=None,
    b1=0.9,
    b2=0.999,
    eps=1e-8,
    weight_decay=0.0,
    weight_lr_power=2.0,
    evaluate=False,
):
    """Yields the parameter after each step.

    Args:
      p: initial parameter, float64.
      grads: gradients at y, one a step.
      lr: learning rate, or without warmup a function of the number of steps taken before.
      warmup_steps: steps over which the learning rate rises from zero, or None.
      b1: how far y is from z towards x, above 0.
      b2: decay of the second moment.
      eps: added outside the root.
      weight_decay: weight decay, from y before the step.
      weight_lr_power: power of the learning rate that weights z in x.
      evaluate: whether to yield x, the mean, where the model is evaluated, in place of y, where it is trained.

    Yields:
      y or x, float64.
    """

    def rate(step):
        return at(lr, step) if warmup_steps is None else lr * min(1.0, step / warmup_steps)

    x = y = z = np.array(p, np.float64)
    v, largest, total = 0.0, 0.0, 0.0
    for t, g in enumerate(np.asarray(grads, np.float64)):
        v = b2 * v + (1 - b2) * g * g
        z = z - rate(t) * (g / (np.sqrt(v / (1 - b2 ** (t + 1))) + eps) + weight_decay * y)
        largest = max(largest, rate(t + 1))
        weight = largest**weight_lr_power
        total += weight
        c = weight / total if total > 0 else 0.0
        x = (1 - c) * x + c * z
        y = (1 - b1) * z + b1 * x
        yield x if evaluate else y
