"""The Triton kernel in Triton's interpreter, on NumPy arrays, where there is neither a GPU nor PyTorch.

Run as a script it reads jobs from one file and writes what the kernel made of them to another: TRITON_INTERPRET decides
when Triton is imported.
"""

import os
import pickle
import sys
import traceback

if __name__ == "__main__":  # pytest imports every file here in search of doctests, and other tests compile
    os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from optax_sr8bit_kernels.launch import grid, is_heavy
from optax_sr8bit_kernels.retarget import to_triton
from optax_sr8bit_kernels.triton_kernel import step_leaves

DTYPES = {
    "bfloat16": tl.bfloat16,
    "float16": tl.float16,
    "float32": tl.float32,
    "uint8": tl.uint8,
    "uint16": tl.uint16,
    "uint32": tl.uint32,
}
MARGIN = 4096  # bytes before and behind each array: 0xFF, which is NaN in every float dtype


class Tensor:
    """As much of a PyTorch tensor as Triton's interpreter asks for, around a NumPy array that it works on in place.

    The array lies within a larger one, whose rest the kernel must leave alone.
    """

    def __init__(self, array):
        self.buffer = np.full(array.nbytes + 2 * MARGIN, 0xFF, np.uint8)
        self.array = self.buffer[MARGIN : MARGIN + array.nbytes].view(array.dtype).reshape(array.shape)
        self.array[...] = array
        self.dtype = DTYPES[array.dtype.name]
        self.device = type("Device", (), {"type": "cpu"})

    def neighbours_changed(self):
        return not (self.buffer[:MARGIN].min() == self.buffer[-MARGIN:].min() == 0xFF)

    def data_ptr(self):
        return self.array.ctypes.data

    def element_size(self):
        return self.array.itemsize

    def cpu(self):
        return self

    def copy_(self, other):
        return self

    def untyped_storage(self):
        return self

    def is_contiguous(self):
        return True

    def new_empty(self, *args, **kwargs):
        return self

    def set_(self, *args, **kwargs):
        return self

    def storage_offset(self):
        return 0

    def size(self):
        return self.array.shape

    def stride(self):
        return tuple(s // self.array.itemsize for s in self.array.strides)


def map_tree(function, tree):
    return tuple(map_tree(function, t) for t in tree) if isinstance(tree, tuple) else function(tree)


def flat(tree):
    return [x for t in tree for x in flat(t)] if isinstance(tree, tuple) else [tree]


def patch_once(patch=interpreter._patch_lang, patched=set()):  # noqa: B006
    """Each call of a device function patches all of `triton.language` again, which takes most of the time."""

    def patch_unless_done(fn):
        key = tuple(any(value is module for value in fn.__globals__.values()) for module in (tl, tl.core))
        if key in patched:
            return interpreter._LangPatchScope()
        patched.add(key)
        return patch(fn)

    interpreter._patch_lang = patch_unless_done
    return patched


PATCHED = patch_once() if hasattr(interpreter, "_LangPatchScope") else set()


def run(parts, block, how, params, codes, scales, names, runs, result_dtype, steps):
    """Steps a group of leaves.

    Args:
      parts: a `tile.Parts`.
      block: the length of full blocks, or None.
      how: a `launch.Launch`, or None.
      params: per leaf the parameter, a NumPy array; codes, scales and names likewise, as for `step_leaves`.
      runs: per leaf `Shard.runs`, or None where leaves are whole.
      result_dtype: of the differences, or None where the parameters themselves are stepped.
      steps: per step (gradients, control).

    Returns:
      Per step (results, codes, scales).
    """
    over = grid([p.shape for p in params], block, how, runs, is_heavy(parts))
    eight = params[0].dtype if params[0].dtype.itemsize == 1 else None  # a float whose bytes the kernel takes
    params = tuple(p.view(np.uint8) for p in params) if eight else params
    params, codes, scales, names = (map_tree(Tensor, x) for x in (params, codes, scales, names))
    history = []
    for grads, control in steps:
        grads, control = map_tree(Tensor, grads), Tensor(control)
        results = ()
        if result_dtype is not None:  # filled with NaN, which no finite difference is
            results = tuple(Tensor(np.full_like(p.array, np.nan, dtype=result_dtype)) for p in params)
        only_read = [*grads, control, names, *(params if results else ())]
        before = [x.buffer.copy() for x in only_read]
        PATCHED.clear()
        step_leaves[(over.programs,)](
            *(params, codes, scales, results, grads, control, names),
            over.firsts,
            over.rows,
            over.lengths,
            over.inner,
            over.strides,
            parts=to_triton(parts),
            scalar_count=len(control.array) - 3,
            tiling=over.tiling,
        )
        touched = [*only_read, *flat((params, codes, scales, results))]
        assert not any(x.neighbours_changed() for x in touched), "wrote beside an array"
        same = [np.array_equal(x.buffer, old) for x, old in zip(only_read, before, strict=True)]
        assert all(same), "wrote to what it should only read"
        new, *state = map_tree(lambda x: x.array.copy(), (results or params, codes, scales))
        history.append((tuple(x.view(eight) for x in new) if eight else new, *state))
    return history


def attempt(job):
    """What a job gives, or why it fails, in words."""
    try:
        return run(**job)
    except Exception:
        return traceback.format_exc()


if __name__ == "__main__":
    with open(sys.argv[1], "rb") as file:
        jobs = pickle.load(file)
    with open(sys.argv[2], "wb") as file:
        pickle.dump([attempt(job) for job in jobs], file)
