"""What a compiled kernel costs, read from its machine code (SASS) by the disassembler that comes with Triton.

A program is one loop over tiles. Its length is not what a tile costs, for two kinds of code in it never run:

* the repair of a tile that is not finite, which encodes the tile a second time. It is one side of a branch whose other
  side is the usual encoder, in either order; the repair does all that the other does and more, so that it is the
  longer;
* what `BRA.DIV` jumps to where the threads of a warp have diverged before a shuffle. Ours never do. The assembler puts
  this code behind the kernel's end; it jumps back into the loop, but is no loop.

So a tile costs the shortest path through the loop's control-flow graph without the targets of `BRA.DIV`, from where the
loop's only backward jump leads, to that jump. Stores behind a branch (of the scales, by a few of the threads) are one
or two instructions that the shortest path leaves out.
"""

import glob
import heapq
import itertools
import os
import re
import subprocess
from typing import NamedTuple


class Instruction(NamedTuple):
    """One instruction: whether a predicate guards it, its opcode with suffixes, and its operands."""

    guarded: bool
    opcode: str
    operands: str

    @property
    def name(self) -> str:
        return self.opcode.split(".")[0]

    @property
    def target(self) -> int | None:
        """The address that it may jump to; None for what does not jump, or only where a warp has diverged."""
        if self.name not in ("BRA", "JMP") or ".DIV" in self.opcode:
            return None
        return int(re.findall(r"0x([0-9a-f]+)", self.operands)[-1], 16)

    @property
    def falls_through(self) -> bool:
        """Whether the next instruction may follow; a uniform branch names its predicate among the operands."""
        if self.name in ("EXIT", "RET") or self.target is not None:
            return self.guarded or re.search(r"\bU?P\d", self.operands) is not None
        return True


class Cost(NamedTuple):
    """What a kernel costs.

    Attributes:
      registers: of a thread.
      stack: bytes of a thread.
      spills: loads from and stores to a thread's local memory.
      loop: instructions that a warp executes for a tile; 0 without a loop.
    """

    registers: int
    stack: int
    spills: int
    loop: int


LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;", re.MULTILINE)


def disassembler() -> str | None:
    """The path of `cuobjdump` in the wheel of Triton."""
    import triton

    found = glob.glob(os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump*"))
    return found[0] if found else None


def parse(text: str) -> dict[int, Instruction]:
    """The instructions of one kernel by address."""
    return {int(a, 16): Instruction(bool(guard), op, rest) for a, guard, op, rest in LINE.findall(text)}


def successors(code: dict[int, Instruction]) -> dict[int, list[int]]:
    """By address where control may go next."""
    addresses = list(code)
    following = dict(itertools.pairwise(addresses))
    return {
        a: [
            *([following[a]] if one.falls_through and a in following else []),
            *([one.target] if one.target is not None else []),
        ]
        for a, one in code.items()
    }


def distances(edges: dict[int, list[int]], start: int) -> dict[int, int]:
    """How many instructions are executed at least from `start` up to each that can be reached, both counted."""
    distance, queue = {start: 1}, [(1, start)]
    while queue:
        so_far, at = heapq.heappop(queue)
        for after in edges[at]:
            if so_far + 1 < distance.get(after, len(edges) + 1):
                distance[after] = so_far + 1
                heapq.heappush(queue, (so_far + 1, after))
    return distance


def loop_length(code: dict[int, Instruction]) -> int:
    """Instructions on the shortest way around the only loop; 0 where there is none."""
    edges = successors(code)
    reached = distances(edges, next(iter(code)))
    # The assembler ends a kernel with a jump to itself, which nothing reaches.
    backward = [(a, b) for a in reached for b in edges[a] if b <= a]
    assert len(backward) <= 1, f"{len(backward)} loops"
    return max((distances(edges, head)[jump] for jump, head in backward), default=0)


def cost(cubin: bytes, path) -> Cost:
    """The cost of the kernel in a cubin, which is written to that path."""
    path.write_bytes(cubin)

    def run(option):
        command = [disassembler(), option, str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    code, usage = parse(run("-sass")), run("-res-usage")
    registers, stack = (int(re.search(rf"{word}:(\d+)", usage)[1]) for word in ("REG", "STACK"))
    spills = sum(one.name in ("LDL", "STL") for one in code.values())
    return Cost(registers, stack, spills, loop_length(code))
