"""Time and memory of an optimizer's step in PyTorch: the peers, as far as they are installed, on the same shapes.

python examples/benchmarks/torch_step.py --shapes single llama1b --json torch_step.json
"""

import importlib
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import record
import runner
import shapes

DEVICE = "cuda"
PACKAGES = ("torch", "triton", "bitsandbytes", "torchao", "flashoptim", "torch-optimi")
ADAMW = {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.999)}
LION = {"lr": 1e-4, "weight_decay": 0.1, "betas": (0.9, 0.99)}

# Name to (module, class, dtype of parameters and gradients, arguments).
PEERS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "torch.adamw/fp32": ("torch.optim", "AdamW", "float32", ADAMW | {"fused": True}),
    "torch.adamw/bf16": ("torch.optim", "AdamW", "bfloat16", ADAMW | {"fused": True}),
    "bitsandbytes.adamw8bit": ("bitsandbytes.optim", "AdamW8bit", "bfloat16", ADAMW),
    "bitsandbytes.lion8bit": ("bitsandbytes.optim", "Lion8bit", "bfloat16", LION),
    "torchao.adamw8bit": ("torchao.optim", "AdamW8bit", "bfloat16", ADAMW | {"bf16_stochastic_round": True}),
    "torchao.adamwfp8": ("torchao.optim", "AdamWFp8", "bfloat16", ADAMW | {"bf16_stochastic_round": True}),
    "flashoptim.adamw/bf16": ("flashoptim", "FlashAdamW", "bfloat16", ADAMW | {"master_weight_bits": None}),
    "flashoptim.adamw/24_bit": ("flashoptim", "FlashAdamW", "bfloat16", ADAMW | {"master_weight_bits": 24}),
    "flashoptim.lion/bf16": ("flashoptim", "FlashLion", "bfloat16", LION | {"master_weight_bits": None}),
    "optimi.adamw/kahan": ("optimi", "AdamW", "bfloat16", ADAMW | {"kahan_sum": True, "triton": True}),
}


def installed() -> dict[str, tuple[str, str, str, dict[str, Any]]]:
    return {name: peer for name, peer in PEERS.items() if importlib.util.find_spec(peer[0].split(".")[0])}


def timed(function: Callable[[], Any], repeats: int, rounds: int) -> float:
    """Median seconds of one call on the device: events around so many calls, which are enqueued together."""
    import torch

    seconds = []
    for _ in range(rounds + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeats):
            function()
        end.record()
        torch.cuda.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3 / repeats)
    return statistics.median(seconds[1:])


def draw(tree: shapes.Shapes, dtype: Any) -> list[Any]:
    """Parameters with their gradients, normal numbers of the sizes that step.py draws."""
    import torch

    generator = torch.Generator(device=DEVICE).manual_seed(0)

    def leaf(shape: tuple[int, ...], scale: float) -> Any:
        # Drawn in the dtype itself: a float32 copy of a large leaf would stay in the allocator's cache.
        return torch.empty(shape, dtype=dtype, device=DEVICE).normal_(0, scale, generator=generator)

    params = []
    for shape in tree.values():
        params.append(torch.nn.Parameter(leaf(shape, 0.02)))
        params[-1].grad = leaf(shape, 1e-3)
    return params


def measure(peer: tuple[str, str, str, dict[str, Any]], tree: shapes.Shapes, steps: int, rounds: int) -> dict[str, Any]:
    """One row, with the keys of step.py's where PyTorch knows them."""
    import torch

    module, name, dtype, arguments = peer
    torch.compiler.reset()  # torchao compiles its steps, and there is a limit on how many
    torch.cuda.empty_cache()
    begin = torch.cuda.memory_allocated()
    params = draw(tree, getattr(torch, dtype))
    drawn = torch.cuda.memory_allocated()
    start = time.perf_counter()
    optimizer = getattr(importlib.import_module(module), name)(params, **arguments)
    optimizer.step()
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    size = shapes.parameters(tree)
    stored = size * params[0].element_size()
    # Read off the allocator, because every peer keeps its state in a form of its own.
    state = torch.cuda.memory_allocated() - drawn
    for _ in range(3):
        optimizer.step()
    torch.cuda.synchronize()

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()

    returns = []
    for _ in range(2 * rounds):  # on an idle device, as in step.py
        torch.cuda.synchronize()
        start = time.perf_counter()
        optimizer.step()
        returns.append(time.perf_counter() - start)
    seconds = timed(optimizer.step, steps, rounds)
    return {
        "kept_bytes_per_parameter": record.digits((stored + state) / size),
        "temporary_bytes_per_parameter": record.digits((peak - before) / size),
        "device_peak_bytes_per_parameter": record.digits((peak - begin) / size),
        "compile_s": record.digits(first, 3),
        "dispatch_ms": record.digits(statistics.median(returns) * 1e3),
    } | record.rates(seconds, size, record.moved_bytes(stored, stored, state))


def copy_gb_per_s(small: bool) -> float:
    """Of `copy_` on 1 GiB of float32, bytes read and written."""
    import torch

    source = torch.empty(2**24 if small else 2**28, dtype=torch.float32, device=DEVICE).normal_()
    target = torch.empty_like(source)
    seconds = timed(lambda: target.copy_(source), 8, 9)
    return 2 * 4 * source.numel() / seconds / 1e9


def main(argv: list[str] | None = None) -> None:
    if not importlib.util.find_spec("torch"):
        sys.exit("torch_step.py times optimizers of PyTorch, which is not installed")
    arguments = runner.parse(__doc__, installed(), argv)
    import torch

    if not torch.cuda.is_available():
        sys.exit("torch_step.py needs a CUDA GPU, and PyTorch sees none")
    result = record.environment(torch.cuda.get_device_name(), PACKAGES, platform="gpu", cuda=torch.version.cuda)
    runner.run(arguments, installed(), measure, copy_gb_per_s, result)


if __name__ == "__main__":
    main()
