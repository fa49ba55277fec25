"""The command itself: fast help, exit codes, did-you-mean, and no torch before it is needed."""

from __future__ import annotations

import errno
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest


def flatshift(*arguments: str, cwd: Path | None = None, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flatshift", *arguments], capture_output=True, text=True, cwd=cwd, timeout=timeout
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["train", "--help"],
        ["select", "--help"],
        ["sweep", "--help"],
        ["recipes", "list"],
        ["train", "wamup"],
        ["train", "warmup", "--trian.steps", "3"],
        ["train", "warmup", "--mesh.dp", "3"],
        ["nonsense"],
        ["train", "classify", "--data", "nope.jsonl", "--out", "none"],
        ["train", "classify", "--data.dev.files", "[nope.jsonl]", "--out", "none"],
        ["select", "--pool", "nope.jsonl", "--target", "sample:banking/train", "--budget", "3", "--out", "none"],
        ["sweep", "classify", "--data", "nope.jsonl", "--grid", "adapter.rank=1,2", "--out", "none"],
        ["eval", "run", "--data", "nope.jsonl"],
        ["predict", "run", "--data", "nope.jsonl", "--out", "none.csv"],
    ],
)
def test_torch_is_not_imported_to_parse(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom flatshift.cli import run\n"
        f"run({arguments!r})\n"
        "heavy = {'torch', 'transformers', 'peft', 'sklearn', 'matplotlib', 'pyarrow'} & sys.modules.keys()\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert ("nope.jsonl: no such file" in result.stderr) == any("nope.jsonl" in word for word in arguments)


def test_importing_flatshift_is_light() -> None:
    code = "import sys, flatshift; sys.exit('torch' in sys.modules or not flatshift.__version__)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_every_public_name_resolves() -> None:
    import flatshift

    for name in flatshift.__all__:
        assert getattr(flatshift, name) is not None


def test_help_is_quick() -> None:
    best = float("inf")
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert flatshift("--help").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    # CPU seconds: other tests share the cores. The bar is 0.3; this only catches a heavy import that crept in.
    assert best < 1.0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], "did you mean 'train'"),
        (["train"], "RECIPE"),
        (["train", "wamup"], "'warmup'"),
        (["train", "warmup", "--train.stpes", "3"], "'train.steps'"),
        (["train", "warmup", "--train.steps"], "needs a value"),
        (["train", "warmup", "--steps", "4"], "did you mean `--train.steps`"),
        (["train", "warmup", "--holdot", "0.2"], "did you mean `--data.holdout`"),
        (["select", "--budgt", "3"], "did you mean --budget?"),
        (["train", "warmup", "--rank=4"], "did you mean `--adapter.rank`"),
        (["sweep", "double-descent", "--lr", "1e-3"], "`--optimizer.lr`"),
        (["train", "warmup", "--mesh.dp", "3"], "mesh.dp"),
        (["train", "warmup", "--mesh.tpp", "2"], "'mesh.tp'"),
        (["train", "warmup", "--regularizer.sigma", "-1"], "sigma"),
        (["select", "--pool", "p.jsonl"], "--out"),
        (["select", "--pool", "p.jsonl", "--out", "x"], "--budget"),
        (["sweep", "double-descent"], "--out"),
        (["sweep", "double-descent", "--out", "s", "--grid", "adapter.rnk=1,2"], "'adapter.rank'"),
        (["sweep", "double-descent", "--out", "s", "--grid", "adapter.rank"], "key=v1"),
        (["sweep", "double-descent", "--out", "s", "--grid", "adapter.rank=1,x"], "whole number"),
        (["recipes", "show", "wamup"], "'warmup'"),
        (["recipes", "show", "warmup", "--json"], "--json is of `recipes list` and `recipes from`"),
        (["recipes", "copy", "warmup", "r.yaml", "--json"], "leave it out of recipes copy"),
        (["eval", "nowhere"], "not a run directory"),
        (["report", "nowhere"], "nowhere"),
        (["report"], "needs a DIRECTORY"),
        (["report", "nowhere", "--out", "."], "name an HTML file"),
        (["report", "nowhere", "--out", "page.pdf"], "a report is an HTML page; name it page.html"),
        (["train", "--resume", "nowhere"], "not a run directory"),
    ],
)
def test_user_mistakes_exit_2_with_one_sentence(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    from flatshift.cli import run

    monkeypatch.chdir(tmp_path)
    code, said = run(arguments), capsys.readouterr().err
    assert code == 2, said
    assert words in said
    assert "Traceback" not in said
    assert not list(tmp_path.iterdir()), "nothing may be left behind"


def test_a_recipe_with_another_suffix_is_suggested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    from flatshift.cli import run

    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("extends: classify\n", encoding="utf-8")
    for name in ("mine.yml", "main.yaml"):
        assert run(["train", name]) == 2 and "did you mean 'mine.yaml'?" in capsys.readouterr().err


def test_a_process_of_its_own_exits_2_with_one_sentence(tmp_path: Path) -> None:
    result = flatshift("sweep", "double-descent", "--out", "s", "--grid", "adapter.rnk=1,2", cwd=tmp_path)
    assert result.returncode == 2 and "'adapter.rank'" in result.stderr and "Traceback" not in result.stderr
    assert not list(tmp_path.iterdir())


def test_the_help_of_train_lists_every_key_once(capsys) -> None:
    from flatshift.cli import run
    from flatshift.experiments.recipe.schema import dotted_keys

    assert run(["train", "--help"]) == 0
    shown = capsys.readouterr().out.partition("recipe keys")[2]
    rooms = dict(
        (room, rest.replace(",", " ").split())
        for room, rest in re.findall(r"^  --(\w*)\.? (.*(?:\n      .*)*)", shown, re.M)
    )
    listed = [f"{room}.{key}" if room else key for room, keys in rooms.items() for key in keys]
    assert sorted(listed) == sorted(dotted_keys())
    assert {"train.steps", "adapter.rank", "select.method.epsilon", "backbone"} <= set(listed)


def test_the_help_of_select_names_every_method_that_is_divided(capsys) -> None:
    from flatshift.cli import run
    from flatshift.experiments.select.stages import METHODS

    assert run(["select", "--help"]) == 0
    assert f"({', '.join(METHODS)})" in " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_every_last_word_of_a_key_finds_that_key() -> None:
    from flatshift.experiments.recipe.schema import dotted_keys, find_keys_ending_with

    assert all(key in find_keys_ending_with(key.rpartition(".")[2]) for key in dotted_keys() if "." in key)
    assert find_keys_ending_with("steps")[0] == "train.steps" and not find_keys_ending_with("stpes")


def test_recipes_copy_refuses_to_overwrite(tmp_path: Path) -> None:
    assert flatshift("recipes", "copy", "classify", cwd=tmp_path).returncode == 0
    assert (tmp_path / "classify.yaml").is_file()
    assert flatshift("recipes", "copy", "classify", cwd=tmp_path).returncode == 2


def test_a_bug_of_ours_shows_its_traceback(monkeypatch, capsys) -> None:
    from flatshift import cli

    def broken(_argv: list[str]) -> int:
        raise RuntimeError("ours")

    monkeypatch.setattr("flatshift.commands.doctor.run", broken)
    assert cli.run(["doctor"]) == 70
    assert "RuntimeError: ours" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["EPERM", "ENAMETOOLONG", "ELOOP", "EINVAL", "EEXIST"])
def test_a_path_that_the_system_refuses_is_a_mistake_in_the_input(name: str, monkeypatch, capsys) -> None:
    import errno
    import os

    from flatshift import cli

    code = getattr(errno, name)

    def refused(_argv: list[str]) -> int:
        raise OSError(code, os.strerror(code), "runs/x")

    monkeypatch.setattr("flatshift.commands.train.run", refused)
    assert cli.run(["train"]) == 2
    assert capsys.readouterr().err == f"flatshift: error: runs/x: {os.strerror(code)}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "x" * 300],
        ["train", "classify", "--out", "x" * 300],
        ["train", "classify", "--out", "run", "--backbone", "x" * 300],
        ["train", "classify", "--out", "run", "--data.train.files", "x" * 300],
    ],
)
def test_a_name_that_is_too_long_is_a_mistake_in_the_input(arguments: list[str], monkeypatch, tmp_path, capsys) -> None:
    from flatshift import cli

    monkeypatch.chdir(tmp_path)
    assert cli.run(arguments) == 2
    assert "File name too long" in capsys.readouterr().err


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EMFILE, errno.EFBIG])
@pytest.mark.parametrize(("command", "ends"), [("train", 3), ("sweep", 3), ("report", 2), ("merge", 2)])
def test_a_disk_that_fails_is_said_in_one_sentence(monkeypatch, capsys, code: int, command: str, ends: int) -> None:
    from flatshift import cli

    def fail(_argv: list[str]) -> int:
        raise OSError(code, os.strerror(code), "runs/x")

    monkeypatch.setattr(f"flatshift.commands.{command}.run", fail)
    assert cli.run([command]) == ends
    (said,) = capsys.readouterr().err.splitlines()
    assert "runs/x" in said and len(said) < 300
    assert ("the disk is full" in said) == (code in (errno.ENOSPC, errno.EDQUOT))
    assert ("resume" in said) == (ends == 3)


@pytest.mark.parametrize(("command", "ends"), [("train", 3), ("sweep", 3), ("eval", 2), ("merge", 2)])
def test_only_train_gives_the_advice_of_train_on_memory(monkeypatch, capsys, command: str, ends: int) -> None:
    from flatshift import cli

    def fail(_argv: list[str]) -> int:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(f"flatshift.commands.{command}.run", fail)
    assert cli.run([command]) == ends
    (said,) = capsys.readouterr().err.splitlines()
    assert "can't allocate memory" in said
    assert ("--mesh.dp" in said) == (command == "train") != ("free some memory and " in said)
    assert ("run the same command again" in said) == (ends == 2)


def test_the_words_of_safetensors_are_those_of_the_system() -> None:
    from safetensors import SafetensorError

    from flatshift.finetune.errors import Interrupted, describe_disk_error
    from flatshift.finetune.run_directory import disk_full_interrupts

    assert (
        describe_disk_error(SafetensorError("I/O error: No space left on device (os error 28)")) == "the disk is full"
    )
    assert "Input/output" in str(describe_disk_error(SafetensorError("I/O error: something (os error 5)")))
    assert (
        describe_disk_error(SafetensorError("header too small")) is None
        and describe_disk_error(ValueError("(os error 5)")) is None
    )
    with (
        pytest.raises(Interrupted, match=r"Input/output error.* while saving; resume when"),
        disk_full_interrupts("saving"),
    ):
        raise OSError(errno.EIO, os.strerror(errno.EIO), "x")


def test_a_mistake_is_one_line_of_at_most_300_characters(monkeypatch, capsys) -> None:
    from flatshift import cli
    from flatshift.finetune.errors import UserError

    def refuse(_argv: list[str]) -> int:
        raise UserError(f"{'d/' * 400}rows.jsonl:12: column {'x' * 400!r}\nis no \x1b[31mtext; name another")

    monkeypatch.setattr("flatshift.commands.train.run", refuse)
    assert cli.run(["train"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert len(said.removeprefix("flatshift: error: ")) <= 300
    assert "rows.jsonl:12:" in said and said.endswith("name another") and "\x1b" not in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["select", "--budget", "abc"], "--budget must be a whole number, got 'abc'"),
        (["select", "--budget", "1.5"], "--budget must be a whole number, got '1.5'"),
        (["select", "--epsilon", "x"], "--epsilon must be a number, got 'x'"),
        (["select", "--budgt", "3"], "unrecognized options: --budgt, 3 (did you mean --budget?)"),
        (["select", "--bad-rows", "drop"], "invalid choice 'drop' for argument '--bad-rows'"),
        (["train", "chat", "--model", "gpt2"], "--model is no flag of this command; did you mean `--backbone`?"),
        (["train", "--out"], "missing value for argument '--out'"),
        (["merge"], "PATH is missing"),
        (["eval"], "eval needs a RUN_DIR or a BACKBONE"),
        (["recipes", "frob"], "invalid choice 'frob'"),
        (["train", os.fsdecode(b"caf\xe9.yaml")], "`flatshift train`: 'caf\\udce9.yaml' is not valid UTF-8"),
    ],
)
def test_a_command_line_that_cannot_be_read_is_told_in_one_sentence(capsys, arguments: list[str], said: str) -> None:
    from flatshift import cli

    assert cli.run(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("flatshift: error: ") and said in line and len(line) < 300


@pytest.mark.parametrize(
    ("words", "rest", "targets"),
    [
        ("chat --adapter.targets q_proj v_proj --out x", "chat --out x", ["q_proj", "v_proj"]),
        ("--adapter.targets q_proj v_proj chat", "chat", ["q_proj", "v_proj"]),
        ("--verbose chat --adapter.targets q_proj v_proj", "--verbose chat", ["q_proj", "v_proj"]),
        ("--out x chat --adapter.targets q_proj it's", "--out x chat", ["q_proj", "it's"]),
        ("--adapter.targets [q_proj,v_proj] chat", "chat", ["q_proj", "v_proj"]),
        ("--adapter.targets q_proj chat", "chat", None),
        ("--data a b --adapter.targets q_proj v_proj chat", "chat --data a b", ["q_proj", "v_proj"]),
        ("--data=a --adapter.targets q_proj v_proj chat", "--data=a chat", ["q_proj", "v_proj"]),
        ("chat --data a b --adapter.targets q_proj v_proj --json", "chat --data a b --json", ["q_proj", "v_proj"]),
        ("--data a --adapter.targets q_proj --out x chat", "--data a --out x chat", None),
    ],
)
def test_a_list_takes_several_words(words: str, rest: str, targets: list[str] | None) -> None:
    from flatshift.command_line import split_overrides
    from flatshift.commands.train import Flags
    from flatshift.experiments.recipe.tree import Items, Leaf

    left, (override,) = split_overrides(words.split(), Flags)
    tree = override.children["adapter"].children["targets"]
    assert left == rest.split()
    if targets is None:
        assert isinstance(tree, Leaf) and tree.value == "q_proj"
    else:
        assert isinstance(tree, Items) and [item.value for item in tree.items] == targets


def test_the_recipe_may_follow_the_files_and_a_key(tmp_path: Path, capsys) -> None:
    from flatshift import cli

    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    rows, out = str(tmp_path / "rows.jsonl"), str(tmp_path / "out")
    for words, said in (
        (["language-model"], "takes every word after it as a file, language-model too; write the recipe before --data"),
        (["--train.batch_size", "2", "language-model"], "data.holdout: 0.1 of 2 rows"),
    ):
        assert cli.run(["train", "--data", rows, *words, "--out", out]) == 2
        assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_whole_numbers_may_be_written_as_powers_of_ten(tmp_path: Path, capsys) -> None:
    from flatshift import cli

    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    rows = str(tmp_path / "rows.jsonl")
    for budget in ("1e9", "1E+9"):
        words = ["select", "--pool", rows, "--target", rows, "--budget", budget, "--out", str(tmp_path / "out")]
        assert cli.run(words) == 2
        assert "select.budget: 1000000000 is above the pool's 2 records" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_nothing_is_looked_for_in_a_directory_that_is_gone(tmp_path: Path, monkeypatch, capsys) -> None:
    from flatshift import cli

    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert cli.run(["train", "classify"]) == 2
    assert "current directory is gone" in capsys.readouterr().err


def test_a_stream_that_the_caller_closed_is_no_bug(tmp_path: Path) -> None:
    command = f"'{sys.executable}' -m flatshift recipes"
    assert subprocess.run(["sh", "-c", f"{command} copy chat mine.yaml <&- >&- 2>&-"], cwd=tmp_path).returncode == 0
    assert (tmp_path / "mine.yaml").read_text().startswith("# Fine-tune on conversations")
    result = subprocess.run(["sh", "-c", f"{command} show nope >&-"], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 2 and result.stderr.startswith("flatshift: error: no shipped recipe")


def test_a_run_to_evaluate_may_begin_with_a_tilde(tmp_path: Path, monkeypatch, capsys) -> None:
    from flatshift import cli

    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.resolved.yaml").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cli.run(["eval", "~/run"]) == 2
    assert f"{tmp_path / 'run' / 'recipe.resolved.yaml'} is empty" in capsys.readouterr().err
