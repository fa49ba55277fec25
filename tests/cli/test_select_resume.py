"""A `flatshift select` that is killed between passes goes on with the same command, to the same bits."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from flatshift.cli import run
from flatshift.finetune.lock import exclusive_lock
from flatshift.selection.transport.state import SolverState, StateDirectory

ROWS, TARGETS = 34_000, 300
"""10.2 million pairs: just too many to be solved at once."""


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> list[str]:
    """A pool that is streamed under a small memory cap."""
    folder = tmp_path_factory.mktemp("inputs")
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((40, 6)) * 2
    np.save(folder / "x.npy", (centres[rng.integers(0, 40, ROWS)] + rng.standard_normal((ROWS, 6))).astype(np.float32))
    np.save(folder / "y.npy", (centres[rng.integers(0, 6, TARGETS)] + rng.standard_normal((TARGETS, 6))).astype("f4"))
    for name, count in (("pool", ROWS), ("target", TARGETS)):
        (folder / f"{name}.jsonl").write_text("".join(f'{{"text": "t {i}"}}\n' for i in range(count)), encoding="utf-8")
    made = [
        "select",
        "--pool",
        str(folder / "pool.jsonl"),
        "--data.holdout",
        "0",
        "--target",
        str(folder / "target.jsonl"),
    ]
    made += ["--pool-features", str(folder / "x.npy"), "--target-features", str(folder / "y.npy"), "--budget", "500"]
    made += ["--memory", "0.03", "--select.checks", "false"]
    return [*made, "--epsilon", "0.02", "--select.method.tolerance", "1e-6"]


def killed(words: list[str], out: Path, passes: int) -> None:
    """Run the command in a process that kills itself with SIGKILL once `passes` are on disk."""
    code = f"""
        import os, signal
        from flatshift.selection.transport.state import StateDirectory
        saved = StateDirectory.save
        def save(self, standing):
            saved(self, standing)
            if standing.passes == {passes}:
                os.kill(os.getpid(), signal.SIGKILL)
        StateDirectory.save = save
        from flatshift.cli import run
        run({[*words, "--out", str(out)]!r})
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()


def manifest(out: Path) -> dict:
    return json.loads((out / "manifest.json").read_text(encoding="utf-8"))["selection"]


def test_a_killed_select_goes_on_to_the_same_bits(words, tmp_path: Path, capsys) -> None:
    import torch

    torch.set_num_threads(1)  # as in the process that is killed: bits hold for one number of threads
    assert run([*words, "--out", str(tmp_path / "whole")]) == 0
    whole = manifest(tmp_path / "whole")
    assert whole["solver"] == "streamed" and whole["passes"] >= 3 and whole["resumed"] == 0
    out = tmp_path / "out"
    killed(words, out, 2)
    assert [path.name for path in out.iterdir()] == ["state"]
    assert len(list((out / "state" / "kept").glob("pass-0002-*"))) == 1

    # Another command is refused, and leaves what is there.
    capsys.readouterr()
    other = [word if word != "500" else "400" for word in words]
    assert run([*other, "--out", str(out)]) == 2
    message = capsys.readouterr().err
    assert "unfinished work of another command (select.budget 500, not 400)" in message and message.count("\n") == 1
    # So is a second process at work on it.
    with exclusive_lock(out):
        assert run([*words, "--out", str(out)]) == 2
    assert f"in use by another command (process {os.getpid()})" in capsys.readouterr().err
    assert len(list((out / "state" / "kept").glob("pass-0002-*"))) == 1

    assert run([*words, "--out", str(out)]) == 0
    told = capsys.readouterr().err
    assert "continuing the unfinished selection" in told and "continued after pass 2" in told
    assert manifest(out)["resumed"] == 2 and manifest(out)["passes"] == whole["passes"]
    for name in ("scores.parquet", "selected.jsonl"):
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not (out / "state").exists() and "<title>out" in (out / "report.html").read_text(encoding="utf-8")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert run([*words, "--out", str(out)]) == 2, "a finished directory is never written over"
    assert (told := capsys.readouterr().err).endswith("out is not empty; name another directory\n"), told


def test_an_interrupt_keeps_the_state_and_changed_input_is_told(words, tmp_path: Path, capsys, monkeypatch) -> None:
    place = words.index("--pool-features") + 1
    np.save(tmp_path / "x.npy", np.load(words[place]))
    mine = [*words[:place], str(tmp_path / "x.npy"), *words[place + 1 :]]
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        saved = StateDirectory.save

        def save(self: StateDirectory, standing: SolverState) -> None:
            saved(self, standing)
            raise KeyboardInterrupt

        patch.setattr(StateDirectory, "save", save)
        assert run([*mine, "--out", str(out)]) == 3
    assert "the same command continues from there" in capsys.readouterr().err
    moved = np.load(tmp_path / "x.npy")
    moved[5] += 1.0
    np.save(tmp_path / "x.npy", moved)
    assert run([*mine, "--out", str(out)]) == 2
    assert "belongs to another problem (other features or weights)" in capsys.readouterr().err
    assert len(list((out / "state" / "kept").glob("pass-*"))) == 1


def test_an_interrupt_before_the_first_pass_says_that_nothing_is_kept(
    words, tmp_path: Path, capsys, monkeypatch
) -> None:
    def interrupted(*_, **__) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("flatshift.experiments.select.select.select_into", interrupted)
    assert run([*words, "--out", str(tmp_path / "out")]) == 3
    assert capsys.readouterr().err == "flatshift: interrupted: nothing was kept; the same command starts again\n"
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr("flatshift.experiments.select.select.select", interrupted)
    assert run([*words, "--out", str(tmp_path / "out")]) == 3
    again = shlex.join(["flatshift", *words, "--out", str(tmp_path / "out")])
    assert capsys.readouterr().err == f"flatshift: interrupted: continue with the same command: `{again}`\n"


def test_scores_that_took_long_are_kept_with_what_is_to_be_read_again(tmp_path: Path, monkeypatch) -> None:
    from flatshift.experiments.select import select as journey

    words = ["select", "warmup", "--select.pool.limit", "300", "--select.budget", "60", "--select.checks", "false"]
    words += ["--method", "cynical", "--select.method.repeats", "8"]
    assert run([*words, "--out", str(tmp_path / "whole")]) == 0
    assert manifest(tmp_path / "whole")["most_times"] > 1
    monkeypatch.setattr(journey, "_LONG_S", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(journey, "write_selection", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert run([*words, "--out", str(tmp_path / "out")]) == 3
    assert len(list((tmp_path / "out" / "state").rglob("scores.npz"))) == 1
    monkeypatch.setattr("selection.CynicalSelector.fit", lambda *_, **__: pytest.fail("fitted anew"))
    assert run([*words, "--out", str(tmp_path / "out")]) == 0
    for name in ("scores.parquet", "selected.jsonl"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_too_little_memory_is_told_in_the_users_unit(words, tmp_path: Path, capsys) -> None:
    assert run([*words, "--memory", "0.002", "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert "error: --memory: 0.002 GiB is too little for 34,000 rows and 300 targets; give at least 0.0" in told


def test_a_full_disk_keeps_the_pass_before(tmp_path: Path, monkeypatch) -> None:
    import errno
    from types import SimpleNamespace

    import torch

    from flatshift.selection.transport import state
    from flatshift.selection.transport.kernel import Evaluation
    from flatshift.selection.transport.ranks import ProcessTeam

    best = Evaluation(torch.zeros(2), torch.zeros(3), torch.zeros(2), 0.0, 1.0, None)
    store = StateDirectory(tmp_path, SimpleNamespace(team=ProcessTeam()), {"data": "x"})  # type: ignore[arg-type]
    store.save(SolverState(torch.zeros(2), passes=1, best=best))
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def savez(handle, **_arrays):
        handle.write(b"half")
        raise full

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(state.np, "savez", savez)
        store.save(SolverState(torch.zeros(2), passes=2, best=best))
    assert [path.name for path in tmp_path.iterdir()] == ["pass-0001-process-0.npz"]


def test_the_selection_of_a_run_goes_on_too(tmp_path: Path, monkeypatch) -> None:
    from flatshift.experiments.recipe.schema import Recipe, Select
    from flatshift.experiments.run.console import Console
    from flatshift.experiments.workflows import train
    from flatshift.experiments.workflows.context import run_context
    from flatshift.finetune.errors import Interrupted
    from flatshift.finetune.run_directory import RunDirectory

    found: list[list[str]] = []

    def select_into(_recipe: Recipe, directory: Path, _console: Console, *, state: Path) -> None:
        found.append([path.name for path in state.glob("*")])
        state.mkdir(exist_ok=True)
        (state / "pass-0001-process-0.npz").touch()
        if len(found) == 1:
            raise KeyboardInterrupt
        (directory / "manifest.json").write_text("{}", encoding="utf-8")

    monkeypatch.setattr(train, "select_into", select_into)
    recipe, console = Recipe(select=Select()), Console(quiet=True)
    with run_context(recipe, RunDirectory(tmp_path), console, cell=True) as context:
        pass
    with pytest.raises(Interrupted, match="flatshift train --resume"):
        train._select(context)
    assert [path.name for path in (tmp_path / "selection").iterdir()] == ["state"]
    for _ in range(2):
        train._select(context)
    assert found == [[], ["pass-0001-process-0.npz"]], "what is finished is not made again"
    assert [path.name for path in (tmp_path / "selection").iterdir()] == ["manifest.json"]


def test_a_kill_before_the_first_pass_is_no_obstacle(words, tmp_path: Path) -> None:
    """Wherever the first moments were cut, the command begins anew; anything else in the directory is refused."""
    pool, target = tmp_path / "p.jsonl", tmp_path / "t.jsonl"
    pool.write_text('{"text": "a b"}\n{"text": "c d"}\n', encoding="utf-8")
    target.write_text('{"text": "a b"}\n', encoding="utf-8")
    short = [
        "select",
        "--pool",
        str(pool),
        "--data.holdout",
        "0",
        "--target",
        str(target),
        "--budget",
        "1",
        "--method",
        "length",
    ]
    for number, left in enumerate((None, ".recipe.resolved.yaml.0a1b2c3d.tmp")):
        out = tmp_path / f"out{number}"
        (out / "state").mkdir(parents=True)
        if left:
            (out / "state" / left).touch()
        assert run([*short, "--out", str(out)]) == 0
        assert (out / "scores.parquet").is_file() and not (out / "state").exists()
    out = tmp_path / "changed"
    (out / "state" / "kept").mkdir(parents=True)
    (out / "state" / "recipe.resolved.yaml").write_text("select: {budget: 9}\n", encoding="utf-8")
    (out / "state" / "kept" / "pass-3.npz").touch()
    assert run([*short, "--out", str(out)]) == 2  # another command kept something
    (out / "state" / "kept" / "pass-3.npz").unlink()
    assert run([*short, "--out", str(out)]) == 0
    foreign = tmp_path / "foreign"
    (foreign / "state" / "step-1").mkdir(parents=True)
    assert run([*short, "--out", str(foreign)]) == 2
    assert (foreign / "state" / "step-1").is_dir()


@pytest.mark.parametrize("method", ["dsir", "knn", "cynical"])
def test_scores_that_took_long_are_taken_over(tmp_path: Path, monkeypatch, capsys, method: str) -> None:
    from flatshift.experiments.select import select as journey

    rng = np.random.default_rng(1)
    for name, count in (("pool", 40), ("target", 6)):
        texts = [" ".join(rng.choice(["cat", "car", "paw", "road"], 6)) for _ in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    words = [
        "select",
        "--pool",
        str(tmp_path / "pool.jsonl"),
        "--data.holdout",
        "0",
        "--target",
        str(tmp_path / "target.jsonl"),
    ]
    words += ["--budget", "5", "--method", method, *(("--select.embedder.dim", "2") if method == "knn" else ())]
    assert run([*words, "--out", str(tmp_path / "whole")]) == 0
    monkeypatch.setattr(journey, "_LONG_S", -1.0)
    writes = journey.write_selection
    monkeypatch.setattr(journey, "write_selection", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    out = tmp_path / "out"
    assert run([*words, "--out", str(out)]) == 3
    monkeypatch.setattr(journey, "write_selection", writes)
    for fits in ("dsir.DSIRSelector", "knn.KNNSelector", "cynical.CynicalSelector"):
        monkeypatch.setattr(f"flatshift.selection.methods.{fits}.fit", lambda *_, **__: pytest.fail("fitted again"))
    capsys.readouterr()
    assert run([*words, "--out", str(out)]) == 0
    told = capsys.readouterr().err
    assert "scores of the unfinished selection were taken over" in told and "by a fault" not in told
    assert "profile" in json.loads((out / "manifest.json").read_text(encoding="utf-8"))["selection"]
    assert (out / "selected.jsonl").read_bytes() == (tmp_path / "whole" / "selected.jsonl").read_bytes()
