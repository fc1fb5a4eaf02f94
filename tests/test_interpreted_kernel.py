"""The kernel itself, run by Triton's interpreter, equals the XLA step bit for bit, whatever the launch; no GPU needed.

The interpreter takes square roots and reciprocals as XLA does on a CPU, where a GPU approximates them.
"""

import importlib.util
import math
import os
import pickle
import subprocess
import sys
from pathlib import Path

import jax
import kernel_cases
import numpy as np
import pytest
from tables import as_bits, named

from optax_sr8bit_kernels.shard import Shard

CASES = kernel_cases.cases()
ROOT = Path(__file__).resolve().parent.parent

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton cannot be installed here"),
]


def jobs_of(case):
    """What `interpreter.run` needs, one job a launch."""
    params, codes, scales, names = kernel_cases.leaves(case)
    spec, steps, runs = case.spec, kernel_cases.steps(case), None
    if case.cut:
        (params,), codes, scales = kernel_cases.pieces(case, (params, *map(list, (codes, scales))))
        codes, scales = (tuple(x for (x,) in moments) for moments in (codes, scales))
        steps = [(kernel_cases.pieces(case, grads)[0], word) for grads, word in steps]
        names, runs = where(case, names[0])
    for how in case.launches:
        yield {
            "parts": spec.parts(),
            "block": spec.block,
            "how": how,
            "params": params,
            "codes": codes,
            "scales": scales if spec.codec.blockwise else (),
            "names": names,
            "runs": runs,
            "result_dtype": None if case.delta is None else np.dtype(case.delta),
            "steps": steps,
        }


def where(case, words):
    """Per piece what `names` holds, and its runs; both from an array that numbers the rows and columns."""
    (shape,) = case.shapes
    row = np.arange(math.prod(shape[:-1]), dtype=np.uint32).reshape(*shape[:-1], 1) + np.zeros(shape, np.uint32)
    column = np.arange(shape[-1], dtype=np.uint32) + np.zeros(shape, np.uint32)
    rows, columns = kernel_cases.pieces(case, (row, column))
    shard = Shard(shape, tuple(("axis",) * (k > 1) for k in case.cut))
    names = np.array([[*words, r.flat[0], c.flat[0]] for r, c in zip(rows, columns, strict=True)], np.uint32)
    runs = [shard.runs(piece.shape) for piece in rows]
    for piece, (inner, stride) in zip(rows, runs, strict=True):
        every = np.arange(piece.size // piece.shape[-1])
        assert (every // inner * stride + every % inner + piece.flat[0] == piece[..., 0].reshape(-1)).all()
    return names, runs


@pytest.fixture(scope="session")
def histories(request, tmp_path_factory):
    """By case what XLA does and, per launch, what the kernel does; of the cases that were selected only.

    The interpreter runs meanwhile in one process of its own.
    """
    items = [item for item in request.session.items if item.path == Path(__file__) and hasattr(item, "callspec")]
    selected = [item.callspec.params["case"] for item in items]
    jobs = [(case.name, job) for case in selected for job in jobs_of(case)]
    folder = tmp_path_factory.mktemp("interpreter")
    (folder / "jobs").write_bytes(pickle.dumps([job for _, job in jobs]))
    command = [sys.executable, ROOT / "tests" / "interpreter.py", folder / "jobs", folder / "done"]
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        with jax.default_device(jax.devices("cpu")[0]):
            expected = {case.name: kernel_cases.history(case) for case in selected}
        _, errors = process.communicate()
    assert process.returncode == 0, errors
    found = {name: [] for name in expected}
    for (name, _), history in zip(jobs, pickle.loads((folder / "done").read_bytes()), strict=True):
        found[name].append(history)
    return expected, found


def differing(actual, desired):
    """How many elements differ in their bits; any NaN equals any other."""
    actual, desired = np.asarray(actual), np.asarray(desired)
    assert (actual.dtype, actual.shape) == (desired.dtype, desired.shape)
    different = as_bits(actual) != as_bits(desired)
    if desired.dtype != np.uint8:
        different &= ~(np.isnan(actual) & np.isnan(desired))
    return int(different.sum())


@pytest.mark.parametrize("case", **named(CASES))
def test_the_interpreted_kernel_equals_xla(case, histories):
    expected, found = (h[case.name] for h in histories)
    wrong = []
    for how, history in zip(case.launches, found, strict=True):
        assert not isinstance(history, str), history
        for step, (got, want) in enumerate(zip(history, expected, strict=True)):
            want = kernel_cases.pieces(case, want) if case.cut else want
            for part, a, b in zip(("results", "codes", "scales"), got, want, strict=True):
                if part == "scales" and not case.spec.codec.blockwise:
                    continue
                counts = [differing(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)]
                wrong += [f"{how}, step {step}, {part}: {counts}"] if any(counts) else []
    assert not wrong, "; ".join(wrong)


def test_names_of_cases_are_unique():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
