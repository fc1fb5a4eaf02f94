"""One parameter's state in bitsandbytes' layout: its faults, and from and to the layout of this library."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from optax_sr8bit.checkpoint.moments import FLOAT32, Layout, Leaf, convert_leaf
from optax_sr8bit.checkpoint.torch_dict import BLOCK, IGNORED, MOMENTS, dynamic_map
from optax_sr8bit.codecs import Dynamic
from optax_sr8bit.rule import Moment

DYNAMIC = Dynamic()
# Another machine may compute the published map with other last bits; its values are much farther apart.
MAP_TOLERANCE = 2.0**-20


def faults(fields: Mapping[str, Any], moments: Sequence[Moment], shape: tuple[int, ...]) -> Iterator[str]:
    """What is wrong with the state of a parameter of PyTorch's that shape, in words."""
    suffixes = [MOMENTS[moment.name] for moment in moments]
    known = {"step"} | IGNORED | {kind + suffix for kind in ("state", "qmap", "absmax") for suffix in suffixes}
    if odd := sorted(map(str, set(fields) - known)):
        yield f"unknown fields {odd}"
    if "step" not in fields:
        yield "no step"
    elif np.size(fields["step"]) != 1 or int(np.asarray(fields["step"]).reshape(())) < 0:
        yield f"step must be a non-negative number, is {fields['step']}"
    for suffix in suffixes:
        if "state" + suffix not in fields:
            yield f"no state{suffix}"
            continue
        state = np.asarray(fields["state" + suffix])
        if state.shape != shape:
            yield f"state{suffix} is {list(state.shape)}, expected {list(shape)} (axes= transposes)"
        if state.dtype == np.uint8:
            yield from _faults_of_codes(fields, suffix, state.size)
        elif state.dtype != np.float32:
            yield f"state{suffix} is {state.dtype}, expected uint8 or float32"


def _faults_of_codes(fields: Mapping[str, Any], suffix: str, size: int) -> Iterator[str]:
    for field, wanted in (("qmap" + suffix, 256), ("absmax" + suffix, -(-size // BLOCK))):
        if field not in fields:
            yield f"state{suffix} is uint8, but there is no {field}"
            continue
        array = np.asarray(fields[field])
        if array.dtype != np.float32 or array.shape != (wanted,):
            yield f"{field} is {array.dtype}{list(array.shape)}, expected float32[{wanted}]"
        elif not np.isfinite(array).all():
            yield f"{field} is not finite"


def read_leaf(fields: Mapping[str, Any], moments: Sequence[Moment], wanted: Layout, axes: Sequence[int]) -> Leaf:
    """The moments of a parameter: codes and scales where they mean the same in the wanted layout, else float32.

    Args:
      fields: without faults.
      moments: what they are.
      wanted: how the moments will be stored.
      axes: how PyTorch's axes lie in this library's, as `numpy.transpose` takes them.
    """
    codes, scales, values = [], [], []
    for moment in moments:
        suffix = MOMENTS[moment.name]
        state = np.asarray(fields["state" + suffix])
        if state.dtype != np.uint8:
            values.append(np.array(state.transpose(axes), order="C"))
            continue
        qmap, absmax = (np.asarray(fields[kind + suffix]) for kind in ("qmap", "absmax"))
        each = np.repeat(absmax, BLOCK)[: state.size].reshape(state.shape).transpose(axes)
        code = np.array(state.transpose(axes), order="C")
        values.append(qmap[code] * each)
        published = np.allclose(qmap, dynamic_map(moment.signed), rtol=MAP_TOLERANCE, atol=0)
        scale = _common(each, wanted.block) if wanted.codec.format == DYNAMIC.format and published else None
        if scale is not None:
            codes.append(code)
            scales.append(scale)
    if len(codes) == len(moments):
        return Leaf(wanted, tuple(codes), tuple(scales))
    floats = Layout(wanted.shape, FLOAT32, None, (np.dtype(np.float32),) * len(moments))
    return Leaf(floats, tuple(values), ())


def written_leaf(leaf: Leaf, moments: Sequence[Moment], axes: Sequence[int], in_8_bits: bool) -> dict[str, np.ndarray]:
    """The fields of a parameter but `step`.

    Args:
      leaf: its moments.
      moments: what they are.
      axes: how PyTorch's axes lie in this library's.
      in_8_bits: whether codes are written, else float32.
    """
    back = np.argsort(axes)
    size, rank = int(np.prod(leaf.layout.shape)), len(leaf.layout.shape)
    flat = Layout((size,), DYNAMIC if in_8_bits else FLOAT32, BLOCK if in_8_bits else None, _dtypes(in_8_bits, moments))
    new = _same_codes(leaf, flat, back) if in_8_bits and leaf.layout.codec.format == DYNAMIC.format else None
    if new is None:
        floats = Layout(leaf.layout.shape, FLOAT32, None, _dtypes(False, moments))
        values = [np.asarray(x).transpose(back).reshape(-1) for x in convert_leaf(leaf, floats, tuple(moments)).codes]
        flat_floats = Layout((size,), FLOAT32, None, floats.dtypes)
        new = convert_leaf(Leaf(flat_floats, tuple(values), ()), flat, tuple(moments))
    shape = tuple(leaf.layout.shape[axis] for axis in back) if rank else ()
    fields = {}
    for moment, codes, scales in zip(moments, new.codes, new.scales, strict=True):
        suffix = MOMENTS[moment.name]
        fields["state" + suffix] = np.asarray(codes).reshape(shape)
        if in_8_bits:
            fields["qmap" + suffix] = dynamic_map(moment.signed).copy()
            fields["absmax" + suffix] = np.asarray(scales)
    return fields


def _dtypes(in_8_bits: bool, moments: Sequence[Moment]) -> tuple[Any, ...]:
    return (np.dtype(np.uint8 if in_8_bits else np.float32),) * len(moments)


def _same_codes(leaf: Leaf, flat: Layout, back: Any) -> Leaf | None:
    """A `dynamic` leaf with its own codes over flattened blocks, where each of these has one scale; else None."""
    n, block = leaf.layout.shape[-1], leaf.layout.block
    assert block is not None
    each = [np.repeat(np.asarray(s), block, axis=-1)[..., :n].transpose(back).reshape(-1) for s in leaf.scales]
    scales = [_common(x, flat.block) for x in each]
    if any(scale is None for scale in scales):
        return None
    codes = tuple(np.ascontiguousarray(np.asarray(c).transpose(back)).reshape(-1) for c in leaf.codes)
    return Leaf(flat, codes, tuple(scales))


def _common(each: np.ndarray, block: int | None) -> np.ndarray | None:
    """The scales of blocks along the last axis, [..., ceil(n / block)], if each has one; else None."""
    if block is None:
        return None
    firsts = np.ascontiguousarray(each[..., ::block])
    alike = np.repeat(firsts, block, axis=-1)[..., : each.shape[-1]] == each
    return firsts if alike.all() else None
