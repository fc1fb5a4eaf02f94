"""Train several arms side by side on the same batches; then a table and a figure."""

import dataclasses
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import matplotlib
import numpy as np
from tqdm import tqdm

matplotlib.use("Agg")  # draws into files, needs no display; chosen before pyplot is imported
import matplotlib.pyplot as plt


@dataclasses.dataclass
class Arm:
    """One way to train: its compiled step and, while it runs, its parameters and optimizer state."""

    name: str
    step: Callable[[Any, Any, np.ndarray], tuple[Any, Any, jax.Array]]
    params: Any
    state: Any
    losses: list[float] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)

    def advance(self, windows: np.ndarray) -> None:
        """Take one training step, and time it."""
        started = time.perf_counter()
        self.params, self.state, value = self.step(self.params, self.state, windows)
        jax.block_until_ready((self.params, self.state))
        self.seconds.append(time.perf_counter() - started)
        self.losses.append(float(value))


@dataclasses.dataclass(frozen=True)
class Result:
    """What a row of the table and a line of the figure show."""

    name: str
    validation: float
    gap: float
    """Nats a byte above the first arm of the same learning rate."""
    bytes_per_parameter: float
    median_seconds: float
    losses: list[float]


def bytes_per_parameter(params: Any, state: Any) -> float:
    """Return the bytes of all live arrays of parameters and optimizer state, over the number of parameters."""
    held = sum(leaf.nbytes for leaf in jax.tree.leaves((params, state)))
    return held / sum(leaf.size for leaf in jax.tree.leaves(params))


def run(arms: list[Arm], batches: Iterable[np.ndarray], validate: Callable[[Any], float], title: str) -> list[Result]:
    """Train the arms in turns, so that whatever else the machine does slows all alike; return their results."""
    bar = tqdm(list(batches), desc=title, unit="steps")
    for windows in bar:
        for arm in arms:
            arm.advance(windows)
        bar.set_postfix_str("loss " + " / ".join(f"{arm.losses[-1]:.3f}" for arm in arms))
    validation = [validate(arm.params) for arm in arms]
    return [
        Result(
            name=arm.name,
            validation=value,
            gap=value - validation[0],
            bytes_per_parameter=bytes_per_parameter(arm.params, arm.state),
            median_seconds=float(np.median(arm.seconds)),
            losses=arm.losses,
        )
        for arm, value in zip(arms, validation, strict=True)
    ]


def table(results: list[Result], title: str) -> str:
    """Return a row an arm."""
    width = max(len(result.name) for result in results)
    lines = [f"{title:{width}}   validation loss      gap   bytes/parameter   ms/step"]
    for row in results:
        gap = f"{row.gap:+.4f}" if row is not results[0] else ""
        lines.append(
            f"{row.name:{width}}   {row.validation:15.4f}  {gap:>7}   {row.bytes_per_parameter:15.2f}"
            f"   {row.median_seconds * 1e3:7.1f}"
        )
    return "\n".join(lines)


def smooth(losses: list[float], window: int = 25) -> np.ndarray:
    """Return the mean of the last `window` losses (of fewer at the start), one a step."""
    total = np.cumsum(np.concatenate([[0.0], losses]))
    ends = np.arange(1, len(losses) + 1)
    starts = np.maximum(ends - window, 0)
    return (total[ends] - total[starts]) / (ends - starts)


def figure(panels: dict[str, list[Result]], path: str) -> None:
    """Draw the smoothed training losses, a panel a learning rate, into a PNG."""
    drawing, axes = plt.subplots(1, len(panels), figsize=(5.2 * len(panels), 3.8), squeeze=False, layout="constrained")
    # Distinct widths and dashes: where two curves lie on each other, both can be seen.
    styles = [dict(color="0.7", lw=5), dict(color="tab:red", lw=1.5), dict(color="tab:blue", lw=1.5, ls=(0, (4, 2)))]
    for axis, (title, results) in zip(axes[0], panels.items(), strict=True):
        for result, style in zip(results, styles, strict=True):
            curve = smooth(result.losses)
            axis.plot(np.arange(1, len(curve) + 1), curve, label=f"{result.name}: {result.validation:.3f}", **style)
        settled = [loss for result in results for loss in smooth(result.losses)[len(result.losses) // 20 :]]
        axis.set(title=title, xlabel="step", ylim=(min(settled) - 0.1, max(settled) + 0.1))
        axis.legend(title="validation loss", frameon=False)
    axes[0, 0].set_ylabel("training loss (nats a byte, mean of 25 steps)")
    drawing.savefig(path, dpi=150)
    plt.close(drawing)
