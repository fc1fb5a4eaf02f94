"""The benchmarks on a small scale: shapes, arithmetic, the record, the table, and that a failure stops nothing."""

import importlib.util
import json
import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "benchmarks"))
import contestants
import record
import runner
import shapes
import step
import table
import torch_step

pytestmark = pytest.mark.slow

COUNTS = {  # leaves and parameters, as the models' own descriptions have them
    "single": (1, 65536 * 4096),
    "llama1b": (146, 1_235_814_400),
    "gpt2": (148, 124_439_808),
    "vit_b": (200, 86_567_656),
    "small400": (400, 98_324_480),
    "tiny": (4, 41_473),
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """The record of a run on `tiny`, one of whose three contestants fails, and the file that it was written to."""

    def fail():
        raise RuntimeError("no such kernel")

    path = tmp_path_factory.mktemp("benchmarks") / "step.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(contestants.CONTESTANTS, "adamw/failing", contestants.Contestant(fail))
        names = ["adamw", "adamw/failing", "optax.lion/b*"]
        options = ["--rounds", "2", "--steps", "2", "--commit", "abc123"]
        step.main(["--shapes", "tiny", "--only", *names, *options, "--json", str(path)])
    result = json.loads(path.read_text())
    assert [row["contestant"] for row in result["rows"]] == ["adamw", "optax.lion/bf16", "adamw/failing"]
    return path, result, {row["contestant"]: row for row in result["rows"]}


@pytest.mark.parametrize("name", COUNTS)
def test_shapes_have_the_leaves_and_parameters_of_their_models(name):
    tree = shapes.tree_of(name)
    assert (len(tree), shapes.parameters(tree)) == COUNTS[name]
    small = shapes.tree_of(name, small=True)
    assert small.keys() == tree.keys()
    assert shapes.parameters(small) < 5e6
    assert [len(shape) for shape in small.values()] == [len(shape) for shape in tree.values()]


def test_every_name_of_shapes_is_counted():
    assert shapes.SHAPES.keys() == COUNTS.keys()


@pytest.mark.parametrize(
    ("name", "moved"),
    [
        ("adamw", 10 + 16 / 256),
        ("adamw/block_128", 10 + 16 / 128),
        ("adamw/f32_gradients", 12 + 16 / 256),
        ("adamw/in_place", 10 + 16 / 256),
        ("lion", 8 + 8 / 256),
        ("optax.adamw/bf16", 14),
        ("optax.adamw/fp32", 28),
        ("optax.lion/bf16", 10),
    ],
)
def test_bytes_that_a_step_must_move(name, moved):
    contestant = contestants.CONTESTANTS[name]
    tree = {"kernel": (512, 1024)}
    params, grads = (
        {path: jax.ShapeDtypeStruct(shape, dtype) for path, shape in tree.items()}
        for dtype in (contestant.params, contestant.grads)
    )
    state = jax.eval_shape(contestant.build()[0], params)

    def kept(tree):
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))

    size = shapes.parameters(tree)
    assert record.moved_bytes(kept(params), kept(grads), kept(state)) / size == pytest.approx(moved, abs=1e-3)


def test_rates_and_shares():
    row = record.rates(2e-3, 400_000_000, 4_000_000_000)
    assert row == {"ms": 2.0, "gparam_per_s": 200.0, "gb_per_s": 2000.0, "moved_bytes_per_parameter": 10.0}
    record.add_share(row, 4000.0)
    assert row["share_of_copy"] == 0.5
    failed = {"error": "none"}
    record.add_share(failed, 4000.0)
    assert failed == {"error": "none"}


def test_a_record_says_where_it_ran_and_of_what(rows):
    _, result, by_name = rows
    assert result["device"] == jax.local_devices()[0].device_kind
    assert result["versions"]["jax"] == jax.__version__
    assert result["commit"] == "abc123"
    row = by_name["adamw"]
    # The kernels and the embedding in 8 bits, the bias and the scale in float32.
    coded, small = 128 * 64 + 64 * 512, 513
    state = 2 * coded + 2 * 4 * (128 * 1 + 64 * 2) + 2 * 4 * small
    kept = 2 * (coded + small) + state
    assert row["kept_bytes_per_parameter"] == pytest.approx(kept / row["parameters"], rel=1e-3)
    assert row["aliased_bytes_per_parameter"] == pytest.approx(kept / row["parameters"], rel=1e-2)
    assert row["gb_per_s"] == pytest.approx(row["gparam_per_s"] * row["moved_bytes_per_parameter"], rel=2e-3)
    assert row["share_of_copy"] == pytest.approx(row["gb_per_s"] / row["copy_gb_per_s"], rel=1e-2)
    assert by_name["optax.lion/bf16"]["moved_bytes_per_parameter"] == pytest.approx(10, abs=1e-3)


def test_the_loop_holds_whole_steps(rows):
    for row in rows[2].values():
        if "error" not in row:
            assert row["loop_temporary_bytes_per_parameter"] < row["temporary_bytes_per_parameter"] + 1


def test_a_failure_is_recorded_and_the_rest_runs(rows):
    failed = rows[2]["adamw/failing"]
    assert failed["error"] == "RuntimeError: no such kernel"
    assert failed["leaves"] == 4
    assert all(math.isfinite(rows[2][name]["ms"]) for name in ("adamw", "optax.lion/bf16"))


def test_the_table_replaces_what_stands_between_its_markers(rows, tmp_path, capsys):
    path, result, by_name = rows
    document = tmp_path / "README.md"
    document.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    table.main([str(path), "--write", str(document)])
    text = document.read_text()
    assert text.startswith(f"before\n{table.BEGIN}\n| Gparam/s")
    assert text.endswith(f"{table.END}\nafter\n")
    assert "old" not in text
    row = by_name["adamw"]
    # The share is the table's own, of the record's fastest copy.
    copy = max(measured["copy_gb_per_s"] for measured in result["rows"] if "error" not in measured)
    share = f"{100 * row['gb_per_s'] / copy:.3g}"
    assert float(share) == pytest.approx(100 * row["share_of_copy"], rel=0.02)
    assert f"| `adamw` | 10.25 | {row['gparam_per_s']:.3g} ({share} %) |" in text
    assert "| `adamw/failing` |  | failed |" in text
    for told in ("tiny, 0.0415 M in 4 leaves", result["device"], f"jax {jax.__version__}", "commit abc123"):
        assert told in text

    table.main([str(path), str(path)])
    assert capsys.readouterr().out.count("commit abc123") == 2
    document.write_text("no markers\n")
    with pytest.raises(SystemExit):
        table.main([str(path), "--write", str(document)])
    assert document.read_text() == "no markers\n"


def test_small_steps_are_timed_in_longer_loops():
    def steps(name, *options):
        return runner.steps_together(runner.parse("", ["adamw"], list(options)), shapes.tree_of(name))

    assert [steps(name) for name in ("tiny", "gpt2", "single", "llama1b")] == [100, 69, 32, 20]
    assert steps("single", "--steps", "7") == 7
    assert steps("single", "--small") == 2


def test_bad_command_lines_are_refused(capsys):
    for options, told in {
        ("--only", "novograd"): "--only novograd: no such contestant",
        ("--shapes", "gpt5"): "gpt5",
        ("--rounds", "0"): "must be positive",
    }.items():
        with pytest.raises(SystemExit):
            step.main(list(options))
        assert told in capsys.readouterr().err


def test_without_pytorch_or_cuda_its_benchmark_says_so():
    if importlib.util.find_spec("torch"):
        torch = pytest.importorskip("torch")
        if torch.cuda.is_available():
            pytest.skip("there is a GPU")
    with pytest.raises(SystemExit, match=r"torch_step\.py"):
        torch_step.main([])


def test_arrays_are_drawn_not_zeros():
    tree = {"large": (256, 2**16 + 256), "scalar": (), "vector": (3,)}
    drawn = step.draw(tree, 0.02, jnp.bfloat16, 0)
    assert {path: array.shape for path, array in drawn.items()} == tree
    assert float(jnp.std(drawn["large"][:, :64].astype(jnp.float32))) == pytest.approx(0.02, rel=0.05)
    assert not jnp.array_equal(drawn["large"][0], drawn["large"][1])
