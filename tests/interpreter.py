"""The Triton kernel in Triton's interpreter, on NumPy arrays, where there is neither a GPU nor PyTorch.

Run as a script it reads cases from one file and writes what the kernel did to another: TRITON_INTERPRET decides when
Triton is imported, and other tests compile.
"""

import os
import pickle
import sys

os.environ["TRITON_INTERPRET"] = "1"

import ml_dtypes
import numpy as np
import triton
import triton.language as tl

from optax_sr8bit_kernels.launch import grid
from optax_sr8bit_kernels.retarget import to_triton
from optax_sr8bit_kernels.triton_kernel import step_leaves

DTYPES = {
    "bfloat16": tl.bfloat16,
    "float16": tl.float16,
    "float32": tl.float32,
    "uint8": tl.uint8,
    "uint32": tl.uint32,
}


class Tensor:
    """As much of a PyTorch tensor as Triton's interpreter asks for, around a NumPy array that it works on in place."""

    def __init__(self, array):
        self.array = array
        self.dtype = DTYPES[array.dtype.name]
        self.device = type("Device", (), {"type": "cpu"})

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


def tensors(tree):
    return tuple(map(tensors, tree)) if isinstance(tree, tuple) else Tensor(tree)


def run(parts, block, how, params, grads, codes, scales, results, control, names):
    """The arguments of `triton_call.step_group`, as NumPy arrays; all but gradients, control and names are overwritten."""
    over = grid([p.shape for p in params], block, how)
    step_leaves[(over.programs,)](
        *map(tensors, (params, codes, scales, results, grads, control, names)),
        over.firsts,
        over.rows,
        over.lengths,
        parts=to_triton(parts),
        scalar_count=len(control) - 3,
        tiling=over.tiling,
    )


if __name__ == "__main__":
    with open(sys.argv[1], "rb") as file:
        cases = pickle.load(file)
    for case in cases:
        run(**case)
    with open(sys.argv[2], "wb") as file:
        pickle.dump(cases, file)
    assert ml_dtypes and np and triton
