"""Every tolerance of the arithmetic tests, with its reason. A test names the row it needs."""

import math

ULP = 2.0**-24  # the largest relative error of one correctly rounded float32 operation

# A mean of independent draws lies beyond this many standard errors once in 1.7 million seeds; the seeds are fixed.
STANDARD_ERRORS = 5

# The oracle is float64; a float32 optimizer rounds the parameter once a step. 200 roundings, each uniform within half a
# spacing of at most 2^-23 of the parameter, add up to a random walk of sqrt(200) 0.29 2^-23 = 5e-7; six of those for
# the worst of 8,192 elements. (A step that is a small constant number of spacings is rounded the same way every time:
# the tests use none.)
FLOAT32_TRAJECTORY = 1e-6
FLOAT32_ELEMENT = 3e-6

# Forward error of x 247/a + 1: the division, the product, and the sum or its fused form, each half an ulp.
ENCODE = 3 * ULP

# Scales are a/top, or a times 1/top rounded: two roundings.
SCALE = 2 * ULP

# The dynamic map divides x by absmax before it compares: one rounding of the quotient, one of the table, one of the
# difference, relative to x.
DYNAMIC = 3 * ULP

# The published map is computed in float32 (linspace, mean, product with the decade): three roundings of its own.
DYNAMIC_MAP = 3 * ULP

# Both moments dithered, block 256: 6.7 % was measured on a 25.6 M-parameter language model.
OFFSET_DIRECTION = 0.10

# Averages of the second moment after a drop; with the Weyl dither's lag below the 5 % that a wrong code would cost.
STALL = (0.85, 1.05)

# A Weyl sequence is not independent of its own past: a mean that falls to 1/150 in hundreds of steps lags by a few
# percent of itself. Independent bits have no lag.
WEYL_LAG = 0.10

# Lion's distance to the optimum of a noiseless quadratic, over that with float32 momentum.
LION_QUADRATIC = 1.2

# bitsandbytes' own tests of its 8-bit optimizers against torch (tests/test_optim.py): mean |p - q| and mean relative.
BITSANDBYTES = {"float32": (6e-5, 6e-4), "bfloat16": (1.7e-4, 1.6e-3)}


def sum_of_bernoulli(p: float, steps: int, n: int) -> tuple[float, float]:
    """STANDARD_ERRORS standard errors of the mean and of the variance of n sums of `steps` Bernoulli draws."""
    variance = steps * p * (1 - p)
    fourth = variance * (1 + 3 * variance - 6 * variance / steps)
    return STANDARD_ERRORS * math.sqrt(variance / n), STANDARD_ERRORS * math.sqrt((fourth - variance**2) / n)
