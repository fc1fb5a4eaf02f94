"""Text as bytes: a corpus, its split into training and validation, and its batches."""

import sysconfig
import zlib
from pathlib import Path

import numpy as np

VOCABULARY = 256
"""Tokens are bytes."""


def standard_library() -> tuple[np.ndarray, np.ndarray]:
    """Return the source of the running interpreter's standard library as (training, validation), uint8[n] each.

    About 30 MB. One file in twenty, chosen by its name, is kept for validation, so no validated file was trained on.
    """
    root = Path(sysconfig.get_path("stdlib"))
    installed = {"site-packages", "dist-packages"}
    files = sorted(path for path in root.rglob("*.py") if installed.isdisjoint(path.relative_to(root).parts))
    if not files:
        raise ValueError(f"this Python has its standard library without source ({root}): use --data FILE")
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for path in files:
        name = path.relative_to(root).as_posix().encode()
        parts[zlib.crc32(name) % 20 == 0].append(path.read_bytes())
    training, validation = (np.frombuffer(b"".join(part), np.uint8) for part in parts)
    return training, validation


def text_file(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of a file as (training, validation), uint8[n] each; its last twentieth is validation."""
    data = np.frombuffer(Path(path).read_bytes(), np.uint8)
    end = len(data) - len(data) // 20
    return data[:end], data[end:]


def read(path: str | None, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a file's bytes, or without a path the standard library's, as (training, validation).

    Raises:
        ValueError: the text cannot be read, or has no window of `length` + 1 bytes in both parts.
    """
    try:
        training, validation = standard_library() if path is None else text_file(path)
    except OSError as error:
        raise ValueError(f"cannot read {error.filename}: {error.strerror}") from error
    if min(len(training), len(validation)) <= length:
        raise ValueError(
            f"{path or 'the standard library'} is too short: a window takes {length + 1} bytes, "
            f"and the twentieth kept for validation has {len(validation)}"
        )
    return training, validation


def batch(data: np.ndarray, seed: int, step: int, size: int, length: int) -> np.ndarray:
    """Return the windows of one training step, uint8[size, length + 1]: inputs and, one further, targets.

    The generator is keyed by (seed, step), never advanced: a resumed run sees what the uninterrupted one would have.
    """
    random = np.random.Generator(np.random.Philox(key=[seed, step]))
    starts = random.integers(len(data) - length, size=size)
    return data[starts[:, None] + np.arange(length + 1)]


def validation_batches(data: np.ndarray, batches: int, size: int, length: int) -> np.ndarray:
    """Return windows spread evenly over the text, uint8[batches, size, length + 1], the same on every call."""
    starts = np.linspace(0, len(data) - length - 1, batches * size).astype(np.int64)
    return data[starts[:, None] + np.arange(length + 1)].reshape(batches, size, length + 1)
