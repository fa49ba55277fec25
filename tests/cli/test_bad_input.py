"""Bad input through the commands: refused in one sentence with nothing left behind, and never obeyed by a terminal."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.faults.bad_requests import SCHEMES
from flatshift.cli import run
from flatshift.experiments.run.console import Console
from flatshift.finetune import assets
from flatshift.finetune.lock import exclusive_lock

STEERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
EVIL = "\x1b]0;x\x07\x9b31m\u202e\u2066\x7f"
SHOWN = r"\u001b]0;x\u0007\u009b31m\u202e\u2066\u007f"
SMALL = [
    *("--train.steps", "2", "--train.batch_size", "4", "--train.max_length", "32", "--train.eval_every", "0"),
    *("--train.precision", "fp32", "--eval.bootstrap", "10", "--train.threads", "1", "--train.max_cut", "1"),
    *("--train.device", "cpu", "--train.peak_tflops", "1", "--data.bad_rows", "refuse"),
]
ROWS = [{"text": f"{EVIL} row {i}", "label": "ab"[i % 2] + EVIL, "lang": f"{EVIL}{i % 2}"} for i in range(12)]


def lines(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def refused(capsys: pytest.CaptureFixture[str], argv: list[str], *words: str) -> str:
    """What a command says that ends with exit code 2 and one error."""
    before = sorted(Path.cwd().rglob("*"))
    capsys.readouterr()
    assert run(argv) == 2, argv
    said = capsys.readouterr().err
    (error,) = [line for line in said.splitlines() if line.startswith("flatshift: error: ")]
    assert all(word in error for word in words) and len(error) < 330 and "Traceback" not in said, error
    assert sorted(Path.cwd().rglob("*")) == before
    return error


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def said(home: Path) -> tuple[Path, str]:
    """A run whose rows, labels and folder would steer a terminal, and what its training said."""
    rows, out, heard = lines(home / f"rows{EVIL}.jsonl", ROWS), home / f"runs{EVIL}", io.StringIO()
    test = lines(home / "test.jsonl", [{**row, "text": f"unseen {row['text']}"} for row in ROWS])
    files = ["--data.train.files", rows, "--data.dev.files", "[]", "--data.test.files", test]
    limits = ["--data.train.limit", "null", "--data.test.limit", "null"]
    before, sys.stderr = sys.stderr, heard
    try:
        assert run(["train", "classify", *files, *limits, *SMALL, "--verbose", "--out", str(out)]) == 0
    finally:
        sys.stderr = before
    return out, heard.getvalue()


# --------------------------------------------------------------------------------------------------------- terminals


def test_previews_and_next_commands_steer_no_terminal(said: tuple[Path, str]) -> None:
    out, heard = said
    assert not STEERS.search(heard) and heard.count(SHOWN) > 8
    assert "row 1" in heard and not STEERS.search((out / "log.txt").read_text(encoding="utf-8"))
    command = next(line for line in heard.splitlines() if line.startswith("  flatshift merge "))
    word = command.removeprefix("  flatshift merge ")
    shell = subprocess.run(
        ["bash", "-c", f"printf %s {word}"], capture_output=True, check=True, env={"LC_ALL": "C.UTF-8"}
    )
    assert shell.stdout.decode() == str(out)


def test_tables_figures_and_json_steer_no_terminal(said: tuple[Path, str], home: Path, capsys) -> None:
    out, _ = said
    data = ["--data", str(home / f"rows{EVIL}.jsonl"), "--group-by", "lang", "--train.device", "cpu"]
    for argv in (["runs", str(home)], ["runs", str(home), "--json"], ["eval", str(out), *data]):
        capsys.readouterr()
        assert run(argv) == 0
        told = capsys.readouterr()
        assert SHOWN in told.out and not STEERS.search(told.out + told.err), argv
        if argv[-1] == "--json":
            assert Path(json.loads(told.out)[0]["path"]).name == f"runs{EVIL}"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_libraries_print_steers_no_terminal(monkeypatch, capsys) -> None:
    def warn(name: str, argv: list[str]) -> int:
        sentence = f"{EVIL} https://ann:s3cret@h/a?sig=s3cret"
        monkeypatch.setattr(logging.getLogger("a.library"), "handlers", [logging.StreamHandler()])
        logging.getLogger("a.library").warning(sentence)
        with Console().task("rows", 2) as bar:
            bar(1)
            print(sentence, file=sys.stderr)
        raise RuntimeError(sentence)

    monkeypatch.setattr("flatshift.commands.run", warn)
    assert run(["runs"]) == 70
    plain = capsys.readouterr().err
    monkeypatch.setattr("sys.stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    assert run(["runs"]) == 70
    drawn = sys.stderr.getvalue()
    assert not STEERS.search(plain) and "\x1b[" in drawn and not re.search("\x07|\x9b|\u202e|]0;x\x07", drawn)
    for told in (plain, drawn):
        assert told.count(SHOWN) == 3 and "https://h/a" in told and "s3cret@" not in told and "sig=" not in told, told


class Writer:
    """Finished runs that write what would steer a terminal."""

    def __init__(self, paths: Any, **_: Any) -> None:
        self.names = (EVIL,)

    def ask(self, name: str, asked: Any, *, decoding: Any, on_text: Any) -> Any:
        on_text(EVIL)
        return SimpleNamespace(text=EVIL, tokens=[1], ended=True)

    def answer(self, questions: Any) -> None:
        """Nothing: the question has its reply."""


def test_answers_steer_no_terminal(monkeypatch, capsys) -> None:
    monkeypatch.setattr("flatshift.experiments.workflows.generate.GenerativeRuns", Writer)
    monkeypatch.setattr("sys.stdin", io.StringIO(f"hi\n/runs\n/{EVIL}\n"))
    assert run(["chat", "any"]) == 0
    told = capsys.readouterr()
    assert told.out == f"{SHOWN}\n{SHOWN}\n" and SHOWN in told.err and not STEERS.search(told.err)
    record = {"id": EVIL, "prompt": EVIL, "text": EVIL, "tokens": 1, "ended": True}
    for count in (1, 2):
        monkeypatch.setattr(
            "flatshift.experiments.workflows.generate.generate_from_run",
            lambda *_, **__: [record] * count,  # noqa: B023
        )
        assert run(["generate", "any", "--prompt", "a"]) == 0
        told = capsys.readouterr()
        assert SHOWN in told.out and not STEERS.search(told.out)
    assert run(["generate", "any", "--prompt", "a", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [record, record]


# ------------------------------------------------------------------------------------------------------------- chat


@pytest.mark.parametrize(
    "more",
    [
        "--temperature nan", "--temperature -1", "--temperature 1e-30", "--max-new-tokens 0", "--top-p 2",
        "--top-p 0.5", f"--seed {2**64}", "--seed -1",
    ],
)  # fmt: skip
def test_chat_looks_at_its_settings_before_it_loads(more: str, monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("flatshift.experiments.workflows.generate.GenerativeRuns", None)
    refused(capsys, ["chat", "any", *more.split()], more.split()[0][2:].split("-")[0])


def test_bytes_that_are_no_text_are_named_by_their_line(monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("flatshift.experiments.workflows.generate.GenerativeRuns", Writer)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"fine\n\ncaf\xe9\nfine\n"), encoding="utf-8"))
    refused(capsys, ["chat", "any"], "standard input:3: not valid UTF-8")


# --------------------------------------------------------------------------------------------------- what is left


def test_a_prediction_that_was_refused_may_be_made_again(said: tuple[Path, str], capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    good = [{"text": "fine"}, {"text": "fine too"}]
    lines(tmp_path / "rows.jsonl", [*good, {"label": "a"}])
    argv = ["predict", str(said[0]), "--data", "rows.jsonl", "--out", "out.jsonl"]
    refused(capsys, argv, "rows.jsonl:3: no column 'text'")
    lines(tmp_path / "rows.jsonl", good)
    assert run(argv) == 0
    assert sorted(one.name for one in tmp_path.iterdir()) == ["out.jsonl", "rows.jsonl"]


def test_a_prediction_refused_late_goes_on_with_the_rows_that_stay(said, capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("flatshift.experiments.workflows.predict.PART", 2)
    good = [{"text": f"fine {i}"} for i in range(6)]
    lines(tmp_path / "rows.jsonl", [*good[:5], {"label": "a"}])
    argv = ["predict", str(said[0]), "--data", "rows.jsonl", "--out", "out.jsonl"]
    for _ in range(2):
        assert run(argv) == 2 and "rows.jsonl:6: no column 'text'" in capsys.readouterr().err
    lines(tmp_path / "rows.jsonl", [*good[:2], {"text": "mended"}, *good[3:]])
    assert run(argv) == 0
    assert "2 rows were done before" in capsys.readouterr().err
    told = [json.loads(line)["text"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert told == ["fine 0", "fine 1", "mended", "fine 3", "fine 4", "fine 5"]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["out.jsonl", "rows.jsonl"]

    (tmp_path / "out.jsonl").unlink()
    lines(
        tmp_path / "rows.jsonl", [*good[:3], {"text": " "}, {"label": "a"}]
    )  # both kinds of bad rows, later one first
    assert run(argv) == 2 and "rows.jsonl:4: the text is empty" in capsys.readouterr().err
    assert run([*argv, "--data.bad_rows", "skip"]) == 0
    told = [json.loads(line)["text"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert told == ["fine 0", "fine 1", "fine 2"]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["out.jsonl", "rows.jsonl"]


def test_a_begun_prediction_without_a_part_holds_nothing(said: tuple[Path, str], capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    lines(tmp_path / "rows.jsonl", [{"text": "fine"}])
    (tmp_path / ".out.jsonl.parts").mkdir()
    (tmp_path / ".out.jsonl.parts" / "asked.json").write_text('{"adapter": "another"}')
    assert run(["predict", str(said[0]), "--data", "rows.jsonl", "--out", "out.jsonl"]) == 0


def test_samples_are_written_after_what_they_need_was_found(
    said: tuple[Path, str], capsys, monkeypatch, tmp_path
) -> None:
    monkeypatch.chdir(tmp_path)
    lines(tmp_path / "rows.jsonl", [{"text": "one"}, {"text": "two", "test": "assert 1"}])
    monkeypatch.setattr("flatshift.experiments.workflows.samples.write_samples", None)
    monkeypatch.setattr("flatshift.experiments.workflows.samples.check_sandbox_available", lambda **_: None)
    argv = ["eval", "flatshift-5m", "--data", "rows.jsonl", "--samples", "2", "--out", "out"]
    refused(capsys, [*argv, "--programs"], "rows.jsonl:1: no column 'test'")
    refused(capsys, [*argv, "--toxicity", "nonesuch"], "nonesuch")
    refused(capsys, [*argv, "--toxicity", str(said[0])], "--toxic-label")


@pytest.mark.parametrize(
    "argv",
    ["eval flatshift-5m", "eval flatshift-5m --probe occupations", "tokenizer flatshift-5m", "forecast classify"],
)
def test_an_output_that_cannot_be_replaced_is_refused_before_any_work(argv: str, monkeypatch, capsys, tmp_path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    monkeypatch.chdir(tmp_path / "empty")
    argv += f" --data {lines(tmp_path / 'rows.jsonl', [{'text': 'a', 'label': 'ab'[i % 2]} for i in range(8)])} --out"
    for name in ("evaluate.resolve_subjects", "samples.resolve_subjects", "tokenizer.open_tokenizer"):
        monkeypatch.setattr(f"flatshift.experiments.workflows.{name}", None)
    monkeypatch.setattr("flatshift.experiments.workflows.error_forecast.build_axes", None)
    refused(capsys, [*argv.split(), "."], "is the working directory")
    refused(capsys, [*argv.split(), "../link"], "link is a link")


@pytest.mark.parametrize("named", [False, True])
def test_a_full_disk_is_named_by_where_it_is_written_to(named: bool, monkeypatch, capsys, tmp_path) -> None:
    def full(*_: Any, **__: Any) -> None:
        error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if named:  # as shutil has it of a copy
            error.filename, error.filename2 = "the/source", str(tmp_path / ".page.html.1234abcd.tmp" / "adapter")
        raise error

    monkeypatch.setattr("flatshift.experiments.report.page.build_report", full)
    assert run(["report", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 2
    assert f"the disk is full at {tmp_path / 'page.html'}; free" in capsys.readouterr().err
    with pytest.raises(OSError, match="elsewhere"), exclusive_lock(tmp_path / "out"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "elsewhere/cache")


# ------------------------------------------------------------------------------------------------------------ stores


def test_other_kinds_of_stores_are_refused_by_name(said: tuple[Path, str], monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    rows = lines(tmp_path / "rows.jsonl", [{"text": "a"}])
    for kind in SCHEMES:
        address = f"{kind}://somewhere.example/a/rows.jsonl"
        for argv in (
            ["select", "--pool", address, "--target", rows, "--budget", "1", "--out", "out"],
            ["push", str(said[0]), address],
        ):
            refused(capsys, argv, f"{kind}:// is no kind of store; known are s3://, gs://, az://, hf://, https://")


class Liar(io.BytesIO):
    """An open object of 100 bytes whose store says that it has 99 TB."""

    size = 99 * 10**12


def test_a_store_that_lies_about_a_size_is_not_read_for_ever(monkeypatch, capsys, tmp_path) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    monkeypatch.chdir(tmp_path)
    address, body = "memory:///liar/rows.jsonl", b'{"text": "a row"}\n' * 5 + b"{"
    MemoryFileSystem().pipe(address, body)
    monkeypatch.setattr(MemoryFileSystem, "_open", lambda *_, **__: Liar(body))
    rows = lines(tmp_path / "rows.jsonl", [{"text": "a"}])
    argv = ["select", "--pool", address, "--target", rows, "--budget", "1", "--out", "out"]
    refused(capsys, argv, "gives 91 bytes of the 99,000,000,000,000 that it says")


# ---------------------------------------------------------------------------------------------- files of other commands


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("[]", "not a JSON object"), ("3", "not a JSON object"), ("", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("{}", "model_type"), ('{"model_type": "llama", "num_hidden_layers": 1000000000}', "num_hidden_layers"),
    ],
)  # fmt: skip
def test_a_plan_of_a_config_that_describes_nothing(data: str, words: str, monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shape").mkdir()
    (tmp_path / "shape" / "config.json").write_text(data)
    refused(capsys, ["plan", "--model", "shape"], "config.json", words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "own.yaml:1"), ("text: '{text} {label}'\nlabels: {a: '', b: bad}", "the word for 'a' is empty"),
        ("text: '{text {label}'\nlabels: {a: good, b: bad}", "own.yaml"),
        ("text: '{text} {label}'\nlabels: {a: good, b: good}", "own.yaml"),
    ],
)  # fmt: skip
def test_a_prompt_that_asks_nothing_is_named_by_its_file(text: str, words: str, monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    lines(tmp_path / "rows.jsonl", [{"text": "a", "label": "a"}, {"text": "b", "label": "b"}])
    (tmp_path / "own.yaml").write_text(text)
    refused(capsys, ["eval", "flatshift-5m", "--data", "rows.jsonl", "--prompt", "own.yaml"], "own.yaml", words)


def test_a_pattern_that_the_tokenizers_library_panics_at(monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(str(assets.backbone_directory("flatshift-5m")), tmp_path / "backbone")
    file = tmp_path / "backbone" / "tokenizer.json"
    told = json.loads(file.read_text(encoding="utf-8"))
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    file.write_text(json.dumps({**told, "pre_tokenizer": split}), encoding="utf-8")
    rows = lines(tmp_path / "rows.jsonl", [{"text": "a" * 60 + "!"}] * 8)
    files = ["--data.train.files", rows, "--data.dev.files", "[]", "--data.test.files", "[]"]
    argv = ["train", "language-model", "--backbone", "backbone", *files, *SMALL, "--out", "out"]
    refused(capsys, argv, "tokenizer.json")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("train preference --task.answer x --out out", "task.answer needs the place {answer}"),
        ("eval flatshift-5m --data rows.jsonl --prompt nli --window 5", "--window"),
        ("plan --node 0", "--node must be at least 1"),
        ("plan --model=", "--model is empty"),
        ("sweep classify --out sweep --grid adapter.rank=1,2", "sweep.json"),
        ("compare bad.yaml --out out", "comparison.tasks.t.file cannot be ''"),
        ("train mixed.yaml --out out", "times apart"),
    ],
)
def test_what_means_nothing_is_refused(argv: str, words: str, monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    lines(tmp_path / "rows.jsonl", [{"text": "a", "label": "ab"[i % 2]} for i in range(8)])
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "sweep.json").write_text("[" * 100_000)
    (tmp_path / "bad.yaml").write_text("comparison: {tasks: {t: {file: ''}}}\n")
    sources = "{a: {files: [rows.jsonl], weight: 1e-300}, b: {files: [sample:banking/train]}}"
    data = f"data:\n  train: {{files: [], limit: null, sources: {sources}}}\n"
    (tmp_path / "mixed.yaml").write_text(f"extends: classify\ntrain: {{epochs: null, steps: 2}}\n{data}")
    refused(capsys, argv.split(), words)
