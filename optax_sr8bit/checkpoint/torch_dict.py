"""The shape of a PyTorch optimizer's state_dict, nested or flat, as NumPy arrays; and bitsandbytes' dynamic maps."""

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

# What bitsandbytes hides the quantised tensors behind in its state_dict, so that FSDP does not gather them.
WRAPPED = "__bnb_optimizer_quant_state__"
BLOCK = 256
MIN_8BIT_SIZE = 4096
MOMENTS = {"mu": "1", "nu": "2"}  # the suffix of its keys
IGNORED = {"unorm_vec"}  # room for the norm of an update, written before it is read


@functools.cache
def dynamic_map(signed: bool) -> np.ndarray:
    """bitsandbytes' dynamic map, `create_dynamic_map(signed)`, bit for bit: float32[256], ascending.

    Decade e of seven holds the midpoints of 2**e (signed) or 2**(e+1) equal parts of [0.1, 1], times 10**(e-6); 0 and 1
    are added, and for a signed map the negatives of all midpoints. PyTorch computes the edges from both ends inwards,
    with one rounding of a product and a sum.
    """
    start, stop = np.float32(0.1), np.float32(1.0)
    values = [np.zeros(1, np.float32), np.ones(1, np.float32)]
    for decade in range(7):
        parts = 2 ** (decade if signed else decade + 1)
        step = np.float64((stop - start) / np.float32(parts))
        i = np.arange(parts + 1)
        edges = np.where(i < (parts + 1) // 2, start + step * i, stop - step * (parts - i)).astype(np.float32)
        middles = np.float32(10.0 ** (decade - 6)) * ((edges[:-1] + edges[1:]) / np.float32(2))
        values += [middles, -middles] if signed else [middles]
    table = np.sort(np.concatenate(values))
    table.flags.writeable = False
    return table


def entries(state_dict: Mapping[Any, Any]) -> dict[str, dict[str, Any]]:
    """Per parameter, by its key as a string, the fields of its state.

    Args:
      state_dict: `{"state": {key: {field: value}}}` with or without "param_groups", the inner mapping alone, or a flat
        mapping with keys "key.field" or "state.key.field".

    Raises:
      TypeError: for what is no mapping.
      ValueError: for keys that fit none of these.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict must be a mapping, got a {type(state_dict).__name__}")
    inner = state_dict.get("state", state_dict)
    if not isinstance(inner, Mapping):
        raise ValueError(f'state_dict["state"] must be a mapping, is a {type(inner).__name__}')
    if all(isinstance(value, Mapping) for value in inner.values()):
        return {str(key): {**{k: v for k, v in fields.items() if k != WRAPPED}, **fields.get(WRAPPED, {})}
                for key, fields in inner.items()}  # fmt: skip
    return _unflattened(inner)


def _unflattened(flat: Mapping[Any, Any]) -> dict[str, dict[str, Any]]:
    keys = [str(key) for key in flat if not str(key).startswith("param_groups")]
    odd = [key for key in keys if "." not in key or isinstance(flat.get(key), Mapping)]
    if odd:
        raise ValueError(
            f"state_dict is neither nested, {{'state': {{0: {{...}}}}}}, nor flat with keys like '0.state1': {odd[:5]}"
        )
    prefix = "state." if all(key.startswith("state.") and key.count(".") > 1 for key in keys) else ""
    found: dict[str, dict[str, Any]] = {}
    for key in keys:
        name, _, field = key.removeprefix(prefix).rpartition(".")
        found.setdefault(name.removesuffix("." + WRAPPED), {})[field] = flat[key]
    return found


def flattened(state: Mapping[Any, Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """The inner mapping as a flat one with keys "key.field", all values arrays."""
    return {f"{key}.{field}": np.asarray(value) for key, fields in state.items() for field, value in fields.items()}
