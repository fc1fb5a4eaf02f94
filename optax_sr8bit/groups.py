"""Which leaves one launch steps together."""

import math
from collections.abc import Hashable, Sequence

from optax_sr8bit.leaf import LeafSpec
from optax_sr8bit_kernels.launch import MOST_LEAVES, layout

# A launch on an H200 costs 4 microseconds beside its work; 2**26 parameters take 170. Larger groups would make the
# gradients of more layers wait for each other, and for their memory, in a backward pass that could free them.
LARGEST = 2**26


def group(implementation: str, specs: Sequence[LeafSpec], shapes: Sequence[Sequence[int]]) -> list[list[int]]:
    """Puts leaves of equal specs and layouts together, neighbours first, up to `LARGEST` elements.

    Args:
      implementation: "triton"; XLA steps leaves one by one.
      specs: per leaf its spec.
      shapes: per leaf its shape.

    Returns:
      The leaves' indices, group by group, in order of each group's first leaf.
    """
    sizes = [math.prod(shape) for shape in shapes]
    if implementation == "xla":
        return [[index] for index in range(len(sizes))]
    groups: list[list[int]] = []
    newest: dict[Hashable, list[int]] = {}
    for index, (spec, shape, size) in enumerate(zip(specs, shapes, sizes, strict=True)):
        key = (spec, layout(shape, spec.block) if size else None)
        members = newest.get(key)
        if members is None or len(members) == MOST_LEAVES or sum(sizes[i] for i in members) + size > LARGEST:
            members = newest[key] = []
            groups.append(members)
        members.append(index)
    return groups
