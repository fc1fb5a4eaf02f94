"""States of bitsandbytes read and written, against recordings of its kernels and the layout of its state_dict."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tables import ADAMW, EVERY_RULE, F32, LION, assert_same_bits, normal, run

import optax_sr8bit as sr8
from optax_sr8bit.checkpoint import convert, from_bitsandbytes, to_bitsandbytes
from optax_sr8bit.checkpoint.torch_dict import dynamic_map

GOLDEN = Path(__file__).parent / "golden"
TRAJECTORIES, BLOCKS = (np.load(GOLDEN / f"bitsandbytes_{name}.npz") for name in ("trajectories", "quantize"))
MAPS = {"1": BLOCKS["signed.map"], "2": BLOCKS["unsigned.map"]}
WRAPPED = "__bnb_optimizer_quant_state__"
SUFFIXES = {"adamw": "12", "lion": "1"}

# Units in the last place: the recorded map is within 2 of the one that `dynamic` computes, and the product is rounded.
ULPS = 3


def recorded(opt, dtype="float32", shape=(32, 256)):
    """What AdamW8bit or Lion8bit keeps of a parameter after ten steps."""
    fields = {"step": 10}
    for suffix in SUFFIXES[opt.name]:
        fields[f"state{suffix}"] = TRAJECTORIES[f"{opt.name}.{dtype}.state{suffix}"].reshape(shape)
        fields[f"qmap{suffix}"] = MAPS[suffix]
        fields[f"absmax{suffix}"] = TRAJECTORIES[f"{opt.name}.{dtype}.absmax{suffix}"]
    return fields


def values_of(fields):
    """Per moment bitsandbytes' own values, float32 of PyTorch's shape: the map at the code, times absmax."""
    values = []
    for suffix in (s for s in "12" if "state" + s in fields):
        state = fields["state" + suffix]
        if state.dtype == np.uint8:
            each = np.repeat(fields["absmax" + suffix], 256)[: state.size].reshape(state.shape)
            state = fields["qmap" + suffix][state] * each
        values.append(state)
    return values


def ulps(actual, desired):
    actual, desired = (np.asarray(x, np.float32).view(np.int32) for x in (actual, desired))
    same_sign = (actual < 0) == (desired < 0)
    zero = (actual & 0x7FFFFFFF == 0) & (desired & 0x7FFFFFFF == 0)
    return np.where(zero, 0, np.where(same_sign, np.abs(actual.astype(np.int64) - desired), 2**31)).max(initial=0)


def as_saved(fields, how, tmp_path):
    """The state_dict of one parameter, in each shape in which it may come."""
    quantised = {k: v for k, v in fields.items() if k != "step"}
    if how == "wrapped":  # as bitsandbytes 0.50 returns it
        return {"state": {0: {"step": 10, WRAPPED: quantised}}, "param_groups": [{"lr": 1e-3, "params": [0]}]}
    if how == "nested":
        return {"state": {"0": {"step": np.float32(10.0), **quantised}}, "param_groups": []}
    if how == "inner":
        return {0: fields}
    flat = {f"0.{k}": np.asarray(v) for k, v in fields.items()}
    if how == "flat":
        return flat
    if how == "flat wrapped":
        return {f"state.0.{WRAPPED}.{k}": v for k, v in quantised.items()} | {"state.0.step": np.asarray(10)}
    numpy = pytest.importorskip("safetensors.numpy")
    numpy.save_file({k: np.ascontiguousarray(v) for k, v in flat.items()}, tmp_path / "state.safetensors")
    return numpy.load_file(tmp_path / "state.safetensors")


def test_map_is_the_recorded_one_bit_for_bit():
    for signed, name in ((True, "signed.map"), (False, "unsigned.map")):
        np.testing.assert_array_equal(dynamic_map(signed).view(np.uint32), BLOCKS[name].view(np.uint32))


@EVERY_RULE
@pytest.mark.parametrize("how", ["wrapped", "nested", "inner", "flat", "flat wrapped", "safetensors"])
def test_recorded_states_load_bit_for_bit(opt, how, tmp_path):
    params, tx = {"w": jnp.zeros((32, 256), F32)}, opt(codec="dynamic")
    for dtype in ("float32", "bfloat16"):
        fields = recorded(opt, dtype)
        state = from_bitsandbytes(as_saved(fields, how, tmp_path), tx, params, {"w": 0})
        sr8.check(state, tx, params)
        assert state.count == 10
        for field, suffix in zip(opt.moments, SUFFIXES[opt.name], strict=True):
            assert_same_bits(getattr(state, field)["w"], fields["state" + suffix])
            assert_same_bits(getattr(state, field + "_scale")["w"], fields["absmax" + suffix][:, None])
        back = to_bitsandbytes(state, {"w": 0})["state"][0]
        assert {k: np.asarray(v).dtype for k, v in back.items()} == {k: np.asarray(v).dtype for k, v in fields.items()}
        assert_same_bits(back, fields)


# (shape of the parameter, block size): each of our blocks lies within one of bitsandbytes'.
WITHIN = [((32, 256), 256), ((32, 256), 64), ((64, 128), 256), ((256, 32), 256), ((8192,), 256), ((4, 2048), 128)]


@EVERY_RULE
@pytest.mark.parametrize(("shape", "block"), WITHIN, ids=str)
def test_codes_stay_where_blocks_lie_within_theirs(opt, shape, block):
    params, tx = {"w": jax.ShapeDtypeStruct(shape, F32)}, opt(codec="dynamic", block_size=block)
    fields = recorded(opt, shape=shape)
    state = from_bitsandbytes({0: fields}, tx, params, {"w": 0})
    assert_same_bits(state.mu["w"], fields["state1"])
    inner = convert(state, opt.reference(), params)[0]
    for field, want in zip(opt.moments, values_of(fields), strict=True):
        assert ulps(getattr(inner, field)["w"], want) <= ULPS
    assert_same_bits(to_bitsandbytes(state, {"w": "0"})["state"]["0"], fields)
    # Optax takes bitsandbytes' own values.
    inner = from_bitsandbytes({0: fields}, opt.reference(), params, {"w": 0})[0]
    assert_same_bits([getattr(inner, field)["w"] for field in opt.moments], values_of(fields))


def test_recorded_blocks_decode_to_recorded_values():
    """Normal, heavy tails, seven decades, zeros, one spike, constant, 1e-30, 1e30, half zeros."""
    fields = {"step": 1}
    for suffix, kind in (("1", "signed"), ("2", "unsigned")):
        fields |= {f"state{suffix}": BLOCKS[f"{kind}.codes"], f"qmap{suffix}": BLOCKS[f"{kind}.map"]}
        fields[f"absmax{suffix}"] = BLOCKS[f"{kind}.absmax"]
    params = {"w": jax.ShapeDtypeStruct((10, 256), F32)}
    exact = from_bitsandbytes({0: fields}, optax.adam(1e-3), params, {"w": 0})[0]
    ours = from_bitsandbytes({0: fields}, ADAMW(codec="dynamic", min_8bit_size=0), params, {"w": 0})
    assert_same_bits((ours.mu["w"], ours.nu["w"]), (fields["state1"], fields["state2"]))
    inner = convert(ours, optax.adam(1e-3), params)[0]
    for field, kind in (("mu", "signed"), ("nu", "unsigned")):
        assert ulps(getattr(exact, field)["w"], BLOCKS[f"{kind}.dequant"]) == 0
        assert ulps(getattr(inner, field)["w"], BLOCKS[f"{kind}.dequant"]) <= ULPS


# (shape, axes, block size, codec, bound of the error over the largest magnitude): blocks that do not coincide.
RECODED = {
    "transposed": ((256, 32), (1, 0), 256, "dynamic", 0.0071),
    "convolution": ((3, 3, 32, 64), (2, 3, 1, 0), 256, "dynamic", 0.0071),
    "rows of 300": ((30, 300), (0, 1), 256, "dynamic", 0.0071),
    "larger blocks": ((8, 1024), (0, 1), 512, "dynamic", 0.0071),
    "offset": ((32, 256), (0, 1), 256, "offset", 0.0163),
    "offset_wide": ((32, 256), (0, 1), 128, "offset_wide", 0.0334),
    "short rows": ((512, 16), (0, 1), 256, "dynamic", 0.0),
    "float32": ((32, 256), (1, 0), 256, "float32", 0.0),
}


def coded(shape, seed=0):
    """A state of that shape as bitsandbytes holds it, over several decades."""
    n, rng, fields = int(np.prod(shape)), np.random.default_rng(seed), {"step": 4}
    for suffix in "12":
        fields["state" + suffix] = rng.integers(0, 256, shape, np.uint8)
        fields["qmap" + suffix] = MAPS[suffix]
        fields["absmax" + suffix] = 10 ** rng.uniform(-9, 0, -(-n // 256)).astype(np.float32)
    return fields


@pytest.mark.parametrize("name", RECODED)
def test_other_blocks_are_decoded_and_coded_again(name):
    shape, axes, block, codec, bound = RECODED[name]
    params, tx = {"w": jax.ShapeDtypeStruct(shape, F32)}, ADAMW(codec=codec, block_size=block)
    fields = coded(tuple(np.array(shape)[list(np.argsort(axes))]))
    where = {"w": axes}
    state = from_bitsandbytes({0: fields}, tx, params, {"w": 0}, where)
    inner = convert(state, optax.adam(1e-3), params)[0]
    exact = from_bitsandbytes({0: fields}, optax.adam(1e-3), params, {"w": 0}, where)[0]
    for field, want in zip(("mu", "nu"), values_of(fields), strict=True):
        want = want.transpose(axes)
        assert_same_bits(getattr(exact, field)["w"], np.ascontiguousarray(want))
        error = np.abs(np.asarray(getattr(inner, field)["w"]) - want)
        assert (error <= bound * np.abs(want).max()).all()
        assert bound == 0 or error.max() > 0
    again = to_bitsandbytes(exact, {"w": 0}, where)["state"][0]
    assert again["state1"].shape == fields["state1"].shape
    assert again["absmax1"].shape == fields["absmax1"].shape
    for suffix, got, want in zip("12", values_of(again), values_of(fields), strict=True):
        each = np.repeat(again["absmax" + suffix], 256)[: got.size].reshape(got.shape)
        assert (np.abs(got - want) <= 0.0071 * each).all()


@EVERY_RULE
def test_a_model_there_and_back_and_on(opt, tmp_path):
    """Kernels transposed, a small leaf in float32, names of both sides; the run goes on from it."""
    params = {"dense": {"kernel": normal((64, 256), 0, 0.02), "bias": normal((256,), 1, 0.02)}, "scale": jnp.ones(())}
    names = {"dense/kernel": "dense.weight", "dense/bias": "dense.bias", "scale": "scale"}
    axes = {"*kernel": (1, 0)}
    tx = opt(codec="dynamic")
    params, state = run(tx.step, params, tx.init(params), 2)
    written = to_bitsandbytes(state, names, axes)["state"]
    assert written["dense.weight"]["state1"].shape == (256, 64)
    assert written["dense.weight"]["state1"].dtype == np.uint8
    assert set(written["dense.bias"]) == {"step", *("state" + s for s in SUFFIXES[opt.name])}
    assert_same_bits(written["dense.bias"]["state1"], state.mu["dense"]["bias"])
    flat = to_bitsandbytes(state, names, axes, flat=True)
    numpy = pytest.importorskip("safetensors.numpy")
    numpy.save_file(flat, tmp_path / "s.safetensors")
    read = [
        from_bitsandbytes(x, tx, params, names, axes) for x in (written, numpy.load_file(tmp_path / "s.safetensors"))
    ]
    assert_same_bits(read[1], read[0])
    assert read[0].count == 2
    assert_same_bits(read[0].mu["dense"]["bias"], state.mu["dense"]["bias"])
    (want, got) = (convert(x, opt.reference(), params)[0].mu["dense"]["kernel"] for x in (state, read[0]))
    assert 0 < np.abs(want - got).max() < 2.2 * 0.0071 * np.abs(want).max()
    run(tx.step, params, read[0], 1)
    larger = to_bitsandbytes(state, names, axes, min_8bit_size=10**6)["state"]["dense.weight"]
    np.testing.assert_allclose(larger["state1"].T, want, rtol=1e-6)


def test_another_map_is_decoded_with_its_own():
    """Codes mean what the file's map says, not what `dynamic` would read."""
    fields = recorded(LION)
    fields["qmap1"] = np.linspace(-1, 1, 256, dtype=np.float32)
    params = {"w": jax.ShapeDtypeStruct((32, 256), F32)}
    state = from_bitsandbytes({0: fields}, LION(codec="dynamic"), params, {"w": 0})
    assert np.mean(np.asarray(state.mu["w"]) != fields["state1"]) > 0.5
    error = np.abs(np.asarray(convert(state, optax.lion(1e-3), params)[0].mu["w"]) - values_of(fields)[0])
    assert (error <= 0.0071 * fields["absmax1"][:, None]).all()


def changed(fields, **changes):
    return {k: v for k, v in {**fields, **changes}.items() if v is not None}


def two(**changes):
    return {0: changed(recorded(ADAMW), **changes), 1: recorded(ADAMW)}


PARAMS = {"w": jax.ShapeDtypeStruct((32, 256), F32), "v": jax.ShapeDtypeStruct((32, 256), F32)}
NAMES = {"w": 0, "v": 1}

# name: (arguments, what the message must say)
ERRORS = {
    "no mapping": (dict(state_dict=[1]), ["mapping", "list"]),
    "neither nested nor flat": (dict(state_dict={"weights": np.zeros(3)}), ["nested", "flat", "weights"]),
    "a key missing": (dict(state_dict={0: recorded(ADAMW)}), ["missing: 1"]),
    "a key too many": (dict(state_dict={**two(), 2: recorded(ADAMW)}), ["not expected: 2"]),
    "a name missing": (dict(names={"w": 0}), ["missing: v"]),
    "a name too many": (dict(names={**NAMES, "u": 2}), ["not expected: u"]),
    "a key twice": (dict(names={"w": 0, "v": 0}), ["several leaves", "0"]),
    "steps differ": (dict(state_dict=two(step=9)), ["steps", "'w': 9", "'v': 10"]),
    "no step": (dict(state_dict=two(step=None)), ["w", "no step"]),
    "no second moment": (dict(state_dict=two(state2=None)), [r"w \(0\): no state2"]),
    "lion's state": (dict(state_dict={0: recorded(LION), 1: recorded(LION)}), ["w", "v", "no state2"]),
    "adam's for lion": (dict(tx=LION()), ["w", "v", "unknown.*state2"]),
    "no map": (dict(state_dict=two(qmap1=None)), ["w", "no qmap1"]),
    "no absmax": (dict(state_dict=two(absmax2=None)), ["w", "no absmax2"]),
    "absmax cut": (dict(state_dict=two(absmax1=np.ones(31, np.float32))), ["absmax1", "31", "32"]),
    "absmax not finite": (dict(state_dict=two(absmax1=np.full(32, np.nan, np.float32))), ["absmax1", "finite"]),
    "codes cut": (dict(state_dict=two(state1=np.zeros((31, 256), np.uint8))), [r"state1 is \[31, 256\]"]),
    "codes signed": (dict(state_dict=two(state1=np.zeros((32, 256), np.int8))), ["state1 is int8"]),
    "unknown field": (dict(state_dict=two(max1=np.ones(1))), ["max1"]),
    "no permutation": (dict(axes={"w": (0, 0)}), [r"w: \(0, 0\)"]),
    "axes of no leaf": (dict(axes={"*kernel": (1, 0)}), [r"\*kernel", "no leaf"]),
    "transposed": (
        dict(axes={"w": (1, 0)}, params={**PARAMS, "w": jax.ShapeDtypeStruct((256, 32), F32)},
             state_dict=two(state1=np.zeros((256, 32), np.uint8))),
        [r"state1 is \[256, 32\], expected \[32, 256\]"],
    ),
    "no counterpart": (dict(tx=optax.sgd(1e-3)), ["moments"]),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_what_cannot_be_read(name):
    changes, words = ERRORS[name]
    arguments = {"state_dict": two(), "tx": ADAMW(), "params": PARAMS, "names": NAMES, **changes}
    with pytest.raises((TypeError, ValueError)) as info:
        from_bitsandbytes(**arguments)
    assert not [word for word in words if not re.search(word, str(info.value))], info.value


def test_what_cannot_be_written():
    state = ADAMW().init({"w": jnp.zeros((32, 256))})
    for arguments, word in (
        ((state, {}), "missing: w"),
        ((state, {"w": 0, "v": 1}), "not expected: v"),
        ((state, {"w": 0}, {"x": (1, 0)}), "no leaf"),
        ((optax.sgd(1e-3).init({}), {}), "no state"),
    ):
        with pytest.raises(ValueError, match=word):
            to_bitsandbytes(*arguments)
    with pytest.raises(TypeError, match="concrete"):
        to_bitsandbytes(jax.eval_shape(lambda: state), {"w": 0})
