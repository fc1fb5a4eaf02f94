"""The examples, on a small scale: what they print, draw and refuse, and a resumed run's bits."""

import importlib
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
SMALL = ["--width", "64", "--layers", "1", "--seq", "16", "--batch", "4"]


@pytest.fixture(scope="module", autouse=True)
def on_path():
    """As `python examples/NAME.py` has it: an example imports the modules beside it."""
    sys.path.insert(0, str(EXAMPLES))
    yield
    sys.path.remove(str(EXAMPLES))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """The examples' own source: some 30 kB that are always there."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(b"".join(file.read_bytes() for file in sorted(EXAMPLES.glob("*.py"))))
    return str(path)


def main_of(name):
    return importlib.import_module(name).main


def bits(tree):
    return [(leaf.dtype, leaf.shape, np.asarray(leaf).tobytes()) for leaf in jax.tree.leaves(tree)]


def test_compare_shows_three_arms_at_each_rate(text, tmp_path, capsys):
    figure = tmp_path / "curves.png"
    options = ["--data", text, "--steps", "60", "--lr", "5e-3", "2e-4", "--compare", str(figure)]
    panels = main_of("train_lm")([*SMALL, *options])

    assert figure.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    for title, results in panels.items():
        assert len(results) == 3
        rows = printed.split(title)[1].splitlines()[1:4]
        for row, result in zip(rows, results, strict=True):
            assert row.startswith(result.name)
            assert f"{result.validation:.4f}" in row
            assert f"{result.bytes_per_parameter:.2f}" in row
        full, nearest, stochastic = results
        assert full.losses[0] == pytest.approx(nearest.losses[0], abs=1e-6)  # one initialisation, one first batch
        assert 12.0 <= full.bytes_per_parameter < 12.01
        assert 10.0 <= nearest.bytes_per_parameter < 10.2
        assert 4.0 < stochastic.bytes_per_parameter < 4.2
    low = panels["learning rate 0.0002"]
    assert low[1].gap > 5 * abs(low[2].gap)  # nearest is behind, stochastic rounding lies on FP32


@pytest.mark.parametrize("optimizer", ["adamw", "lion"])
def test_resume_continues_bit_for_bit(optimizer, text, tmp_path, capsys):
    main = main_of("train_lm")
    options = [*SMALL, "--data", text, "--optimizer", optimizer, "--steps", "6", "--checkpoint-every", "3"]
    whole = main([*options, "--checkpoint", str(tmp_path / "whole")])
    # What a run that was interrupted after its third step leaves behind.
    shutil.copytree(tmp_path / "whole" / "3", tmp_path / "part" / "3")
    resumed = main([*options, "--checkpoint", str(tmp_path / "part"), "--resume"])

    assert "resumed after 3 of 6 steps" in capsys.readouterr().out
    assert int(resumed[1].count) == 6
    assert np.dtype(np.uint8) in {leaf.dtype for leaf in jax.tree.leaves(resumed[1].mu)}
    assert jax.tree.structure(resumed) == jax.tree.structure(whole)
    assert bits(resumed) == bits(whole)

    refusals = {
        ("--checkpoint", str(tmp_path / "part")): "already holds a run",
        ("--checkpoint", str(tmp_path / "part"), "--resume", "--seed", "1"): "seed was 0, is 1",
        ("--checkpoint", str(tmp_path / "part"), "--resume", "--steps", "9"): "steps was 6, is 9",
        ("--checkpoint", str(tmp_path / "none"), "--resume"): "no checkpoint in",
    }
    for more, told in refusals.items():
        with pytest.raises(SystemExit):
            main([*options, *more])
        assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--data", "missing.txt"], "missing.txt: No such file"),
        (["--data", "."], "cannot read"),
        (["--data", "short.txt"], "short.txt is too short"),
        (["--resume"], "--resume needs --checkpoint"),
        (["--checkpoint-every", "5"], "--checkpoint-every needs --checkpoint"),
        (["--data", "text.txt", "--checkpoint", "short.txt"], "short.txt is a file"),
        (["--data", "text.txt", "--checkpoint", "new", "--resume"], "no checkpoint in new"),
        (["--compare", "--rounding", "nearest"], "--rounding"),
        (["--compare", "--checkpoint", "here"], "--checkpoint"),
        (["--compare", "no/folder/curves.png"], "no/folder"),
        (["--optimizer", "sgd"], "'sgd'"),
        (["--codec", "int8"], "'int8'"),
        (["--block-size", "100"], "100"),
        (["--steps", "1"], "--steps must be at least 2"),
        (["--batch", "0"], "--batch must be at least 1"),
        (["--width", "100"], "--width must be a multiple of 32"),
        (["--lr", "-1"], "--lr must be positive"),
        (["--lr", "1e-3", "1e-4"], "one rate"),
        (["--lr", "1e-3", "1e-3", "--compare"], "twice"),
    ],
)
def test_bad_command_lines_are_refused(options, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("too short")
    Path("text.txt").write_text("long enough " * 1000)
    with pytest.raises(SystemExit) as refused:
        main_of("train_lm")(options)
    assert refused.value.code == 2
    assert told in capsys.readouterr().err
    assert not Path("new").exists()


def test_a_batch_is_a_function_of_seed_and_step():
    corpus = importlib.import_module("corpus")
    data = np.arange(200, dtype=np.uint8)
    first = corpus.batch(data, 0, 3, 8, 16)
    assert first.shape == (8, 17)
    np.testing.assert_array_equal(first, corpus.batch(data, 0, 3, 8, 16))
    np.testing.assert_array_equal(first - first[:, :1], np.tile(np.arange(17), (8, 1)))
    assert (first != corpus.batch(data, 0, 4, 8, 16)).any()
    assert (first != corpus.batch(data, 1, 3, 8, 16)).any()


def test_validation_files_are_unseen(tmp_path, monkeypatch):
    corpus = importlib.import_module("corpus")
    for index in range(200):
        (tmp_path / f"{index}.py").write_text(f"{index},")
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "installed.py").write_text("not,")
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda name: str(tmp_path))
    training, validation = (bytes(part).decode().split(",")[:-1] for part in corpus.standard_library())
    assert len(training) > len(validation) > 0
    assert sorted(training + validation, key=int) == [str(index) for index in range(200)]


def test_linen_train_state_learns(text, capsys):
    before, after = main_of("linen_train_state")(["--data", text, "--steps", "60"])
    assert after < before - 1
    assert f"{before:.3f} -> {after:.3f}" in capsys.readouterr().out
