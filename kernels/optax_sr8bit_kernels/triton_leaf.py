"""Which leaf of a group a program of the kernel steps, and what belongs to it."""

import triton
import triton.language as tl

from optax_sr8bit_kernels.triton_bits import INTERPRETED
from optax_sr8bit_kernels.triton_names import static_range


@triton.jit
def leaf_of(program, params, codes, scales, results, grads, firsts, rows, lengths, inner, strides):
    """What belongs to the leaf of a program, its run of rows if any, and the leaf's index.

    Selecting among all arguments would keep them in registers. A compiled kernel reads those of its leaf alone, by
    their place among the kernel's parameters: these lie one after another in constant memory.
    """
    leaves: tl.constexpr = len(firsts)
    # Before `grads` there are only pointers; behind its pointers come those to control and names, then integers.
    pointers: tl.constexpr = leaves * (1 + len(codes) + len(scales)) + len(results)
    integers: tl.constexpr = pointers + leaves + 2
    leaf = 0
    if leaves > 1:
        for k in static_range(8):  # there are `launch.MOST_LEAVES`, 2**8 - 1, at most
            middle = leaf + (128 >> k)
            known = tl.minimum(middle, leaves - 1)
            reached = (middle < leaves) & (program >= integer_argument(firsts, integers, known))
            leaf = tl.where(reached, middle, leaf)
    mine = (
        pointer_argument(params, 0, leaf),
        pointer_argument(grads, pointers, leaf),
        integer_argument(firsts, integers, leaf),
        integer_argument(rows, integers + leaves, leaf),
        integer_argument(lengths, integers + 2 * leaves, leaf),
    )
    for i in static_range(len(codes)):
        mine = mine + (pointer_argument(codes[i], leaves * (1 + i), leaf),)
    for i in static_range(len(scales)):
        mine = mine + (pointer_argument(scales[i], leaves * (1 + len(codes) + i), leaf),)
    if len(results) > 0:
        mine = mine + (pointer_argument(results, leaves * (1 + len(codes) + len(scales)), leaf),)
    run = ()
    if len(inner) > 0:
        run = (
            integer_argument(inner, integers + 3 * leaves, leaf).to(tl.uint32),
            integer_argument(strides, integers + 4 * leaves, leaf).to(tl.uint32),
        )
    return mine, run, leaf


@triton.jit
def integer_argument(column, place: tl.constexpr, index):
    """column[index] of int32 arguments of the kernel, of which the first is its `place`-th parameter."""
    if len(column) == 1:
        return column[0]
    elif INTERPRETED:
        return column[index]
    else:
        return parameter(place, index, tl.int32, "=r,r")


@triton.jit
def pointer_argument(column, place: tl.constexpr, index):
    """column[index] of pointers among the arguments of the kernel; as `integer_argument`."""
    if len(column) == 1:
        return column[0]
    elif INTERPRETED:
        return column[index]
    else:
        return tl.multiple_of(parameter(place, index, tl.int64, "=l,r").to(column[0].dtype), 16)


@triton.jit
def parameter(place: tl.constexpr, index, dtype: tl.constexpr, registers: tl.constexpr):
    """The kernel's parameter that lies `index` places behind the `place`-th, all of them of one dtype."""
    bits: tl.constexpr = dtype.primitive_bitwidth
    return tl.inline_asm_elementwise(
        f"""{{
        .reg .b64 a;
        mov.b64 a, step_leaves_param_{place};
        mad.wide.s32 a, $1, {bits // 8}, a;
        ld.param.b{bits} $0, [a];
        }}""",
        registers,
        [index],
        dtype.value,  # Triton 3.6 takes no constexpr there
        is_pure=True,
        pack=1,
    )
