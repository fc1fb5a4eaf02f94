"""What rounding does to sums of many small steps: parameters, slow averages, momenta that should end."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tolerances

import optax_sr8bit as sr8
from optax_sr8bit import codecs

pytestmark = pytest.mark.slow

SPACING = 2.0**-7  # of BF16 in [1, 2)
CODECS = {
    "weyl": codecs.Offset(),
    "philox": codecs.Offset(dither="philox"),
    "nearest": codecs.Offset(dither="nearest"),
    "dynamic": codecs.Dynamic(),
}


def scan(tx, params, gradient, steps, record=lambda params, state: None):
    """`steps` steps of `tx.step` in one program; gradient(step, params) -> gradients."""

    @jax.jit
    def run(params):
        def body(carry, step):
            params, state = tx.step(gradient(step, carry[0]), carry[1], carry[0])
            return (params, state), record(params, state)

        return jax.lax.scan(body, (params, tx.init(params)), jnp.arange(steps))

    (params, state), records = run(params)
    return params, state, records


def decoded(moment, code, scale, block=256):
    """A moment as the optimizer will decode it, float32."""
    if code.dtype == jnp.float32:
        return code
    return moment.decode(code.astype(jnp.uint32), jnp.repeat(scale, block, axis=-1))


def test_constant_updates_accumulate_on_average():
    """1,000 Lion steps of 66/65,536 spacings (1.007e-3; exact in float32), each a Bernoulli draw of one spacing."""
    f, steps, shape = 66 / 65536, 1000, (100, 1000)
    start = jnp.full(shape, 1.5, jnp.bfloat16)
    params, _, _ = scan(sr8.lion(f * SPACING, weight_decay=0.0), start, lambda _, p: jnp.ones_like(p), steps)
    moved = (1.5 - np.asarray(params, np.float64)) / SPACING
    mean_error, variance_error = tolerances.sum_of_bernoulli(f, steps, moved.size)
    assert abs(moved.mean() - steps * f) < mean_error
    assert abs(moved.var() - steps * f * (1 - f)) < variance_error

    nearest = sr8.lion(f * SPACING, weight_decay=0.0, rounding="nearest")
    params, _, _ = scan(nearest, start, lambda _, p: jnp.ones_like(p), 20)
    assert (params == 1.5).all()


def test_weight_decay_alone_shrinks_the_weights():
    """E[w] = 1.5 (1 - 1e-4)^10,000 with gradients zero, though each step is 1/50 spacing; nearest never moves."""
    steps, start = 10_000, jnp.full((10, 1000), 1.5, jnp.bfloat16)
    params, _, _ = scan(sr8.adamw(1e-3, weight_decay=0.1), start, lambda _, p: jnp.zeros_like(p), steps)
    w = np.asarray(params, np.float64)
    error = w.mean() - 1.5 * (1 - 1e-4) ** steps
    assert abs(error) < tolerances.STANDARD_ERRORS * w.std() / np.sqrt(w.size)

    nearest = sr8.adamw(1e-3, weight_decay=0.1, rounding="nearest")
    params, _, _ = scan(nearest, start, lambda _, p: jnp.zeros_like(p), 20)
    assert (params == 1.5).all()


def test_second_moment_does_not_stall():
    """15 of 16 elements of each block lose a factor 1,000 of gradient beside one that keeps it: b2 .999, 3,000 steps.

    A step moves the average by 0.1 %, less than half a code: rounding to nearest holds it up. The dropped elements'
    codes span eight octaves on the way down.
    """
    shape, before, after = (40, 256), 1000, 3000
    dropped = np.arange(256) % 16 != 0
    factor = jnp.where(jnp.asarray(dropped), jnp.float32(1e-3), jnp.float32(1))[None]

    def gradient(step, _):
        g = jax.random.normal(jax.random.fold_in(jax.random.key(0), step), shape)
        return g * jnp.where(step < before, jnp.float32(1), factor)

    def average(codec):
        tx = sr8.adamw(0.0, codec=codec)
        _, state, _ = scan(tx, jnp.zeros(shape, jnp.float32), gradient, before + after)
        return np.asarray(decoded(codec.unsigned, state.nu, state.nu_scale), np.float64)[:, dropped]

    exact = average(codecs.Float32())
    ratios, deviations = {}, {}
    for name, codec in CODECS.items():
        v = average(codec)
        ratios[name], deviations[name] = v.mean() / exact.mean(), (v / exact).std()
    report = "; ".join(f"{n}: v over float32's {ratios[n]:.3f}, std {deviations[n]:.3f}" for n in CODECS)
    print(report)
    low, high = tolerances.STALL
    for name in ("weyl", "philox"):
        assert low < ratios[name] < high, report
    assert deviations["weyl"] < deviations["philox"], report
    for name in ("nearest", "dynamic"):
        assert ratios[name] > 5, report


@pytest.mark.parametrize("b1", [0.9, 0.95, 0.99])
def test_momentum_without_gradient_decays_and_the_parameter_stops(b1):
    """15 of 16 elements of each block get a gradient of zero after 200 steps, as rows of an embedding do.

    In time constants 1/(1 - b1): the mean follows float32's for five, all codes are zero after thirty (from a few
    thousand codes down, the chance that one of 3,840 elements is not is 1e-6).
    """
    shape, before = (16, 256), 200
    constant = round(1 / (1 - b1))
    silent = np.arange(256) % 16 != 0
    columns = np.flatnonzero(silent)

    def gradient(step, _):
        g = jax.random.normal(jax.random.fold_in(jax.random.key(1), step), shape) + 1.0
        return jnp.where((step >= before) & jnp.asarray(silent)[None], jnp.float32(0), g)

    def run(codec):
        tx = sr8.adamw(1e-3, b1=b1, weight_decay=0.0, codec=codec)
        start = jnp.zeros(shape, jnp.float32)

        def record(params, state):
            return decoded(codec.signed, state.mu, state.mu_scale)[:, columns], params[:, columns]

        _, _, (mu, params) = scan(tx, start, gradient, before + 30 * constant, record)
        return np.asarray(mu[before - 1 :], np.float64), np.asarray(params[-1] != params[-2])

    exact, _ = run(codecs.Float32())
    for name in ("weyl", "philox", "nearest"):
        mu, moves = run(CODECS[name])
        if name == "nearest":  # the failure that dither removes
            assert (mu[-1] != 0).all()
            assert moves.all()
            continue
        for k in (1, 2, 3, 5):
            error = mu[k * constant] - exact[k * constant]
            if name == "philox":
                assert abs(error.mean()) < tolerances.STANDARD_ERRORS * error.std() / np.sqrt(error.size)
            assert abs(error.mean()) < tolerances.WEYL_LAG * exact[k * constant].mean()
        assert (mu[-1] == 0).all()
        assert not moves.any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lion_converges_without_noise(dtype):
    """A quadratic with curvatures over two decades, a cosine schedule to zero: the end is where float32's is."""
    rng = np.random.default_rng(0)
    shape, steps = (128, 256), 1000  # with a quarter of the elements another seed changes a ratio by a tenth
    curvature = jnp.asarray(10 ** rng.uniform(-2, 0, shape), jnp.float32)
    target = jnp.asarray(rng.standard_normal(shape), jnp.float32)

    def cosine(step):
        return 0.5e-2 * (1 + jnp.cos(step / steps * np.pi))

    def gradient(_, p):
        return (curvature * (p.astype(jnp.float32) - target)).astype(p.dtype)

    def end(codec):
        tx = sr8.lion(cosine, weight_decay=0.0, codec=codec)
        params, _, _ = scan(tx, jnp.zeros(shape, dtype), gradient, steps)
        return float((np.asarray(curvature) * (np.asarray(params, np.float64) - np.asarray(target)) ** 2).mean())

    ratios = {name: end(CODECS[name]) / end(codecs.Float32()) for name in ("weyl", "philox", "nearest")}
    assert ratios["weyl"] < tolerances.LION_QUADRATIC, ratios
    assert ratios["philox"] < tolerances.LION_QUADRATIC, ratios
    assert ratios["nearest"] > 10, ratios
