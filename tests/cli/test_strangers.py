"""What a stranger's data, template, tokenizer and folder name reach through the commands: nothing but bytes that are
text, addresses without their secrets, and one sentence."""

from __future__ import annotations

import csv
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks.faults.door_texts import ESCAPES, TEMPLATES, TOKENIZERS
from benchmarks.faults.doors import STEERS
from flatshift.cli import run
from flatshift.finetune.assets import backbone_directory
from flatshift.finetune.compute import limited_process
from flatshift.finetune.compute.limited_process import LimitedProcess, LimitExceeded
from flatshift.finetune.data.chat.render import close_renderer, render_in_child, render_jinja
from flatshift.finetune.errors import escape_control_characters

fsspec = pytest.importorskip("fsspec")

SMALL = [
    *("--train.steps", "2", "--train.batch_size", "4", "--train.max_length", "96", "--train.eval_every", "0"),
    *("--train.precision", "fp32", "--eval.bootstrap", "10", "--train.threads", "1", "--eval.train_limit", "0"),
    *("--data.checks.copies", "warn", "--regularizer.kind", "plain"),
]


class Strange(NamedTuple):
    """A run trained on a stranger's rows at a signed address, and what the commands on it printed."""

    path: Path
    address: str
    printed: str


@pytest.fixture(scope="module")
def strange(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Strange]:
    home = tmp_path_factory.mktemp("home")
    place = f"memory://{uuid.uuid4().hex}"
    address = f"{place}/rows.jsonl?X-Amz-Expires=60&X-Amz-Signature=s3cret"
    rows = [
        {"id": f"={i}+1", "text": f"card {i} {ESCAPES} {'lost' if i % 2 else 'here'}", "label": f"a{i % 2}\x1b[5m"}
        for i in range(24)
    ]
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    fsspec.filesystem("memory").pipe_file(address, content)
    out = home / "run\x1b]0;evil\x07"
    with pytest.MonkeyPatch.context() as patch, _captured(home) as read:
        patch.setattr("sys.argv", ["flatshift", "train", "classify", "--data", address])
        files = ["--data", address, "--data.dev.files", "[]", "--data.test.files", f"['{address}']"]
        command = ["train", "classify", "--backbone", "flatshift-encoder-3m", *files, *SMALL, "--out", str(out)]
        assert run(command) == 0, read()
        assert run(["report", str(out)]) == 0, read()
        assert run(["runs", str(home)]) == 0, read()
        before = len(read())
        assert run(["eval", str(out), "--data", address, "--group-by", "text"]) == 0, read()
        assert "accuracy" in read()[before:], read()[before:]
        assert run(["predict", str(out), "--data", address, "--out", str(home / "p.csv")]) == 0, read()
        assert run(["predict", str(out), "--data", address, "--out", str(home / "raw.tsv"), "--raw"]) == 0, read()
        assert run(["predict", str(out), "--data", address, "--out", str(home / "p.jsonl"), "--raw"]) == 2, read()
        assert run(["train", "--resume", str(out), "--data.train.files", address]) == 0, read()
        assert run(["eval", str(out), "--data", address.replace("rows", "absent")]) == 2, read()
        assert run(["doctor", str(out)]) == 0, read()
        printed = read()
    yield Strange(out, address, printed)
    fsspec.filesystem("memory").rm(place, recursive=True)


class _captured:
    """What commands print, at the level of file descriptors; pytest's own fixture has no module scope."""

    def __init__(self, home: Path) -> None:
        self.file = home / "printed.log"

    def __enter__(self) -> Callable[[], str]:
        import sys
        from contextlib import ExitStack, redirect_stderr, redirect_stdout

        self.stack = ExitStack()
        stream = self.stack.enter_context(self.file.open("w", encoding="utf-8", errors="backslashreplace", newline=""))
        self.stack.enter_context(redirect_stdout(stream))
        self.stack.enter_context(redirect_stderr(stream))

        def read() -> str:
            sys.stdout.flush()
            return self.file.read_bytes().decode()

        return read

    def __exit__(self, *_: object) -> None:
        self.stack.close()
        self.file.unlink()


def test_no_secret_is_written_or_printed(strange: Strange) -> None:
    holders = [file for file in strange.path.parent.rglob("*") if file.is_file() and b"s3cret" in file.read_bytes()]
    assert not holders and "s3cret" not in strange.printed
    bare = strange.address.partition("?")[0]
    for name in ("manifest.json", "recipe.resolved.yaml", "command.txt", "report.html"):
        assert bare in (strange.path / name).read_text(encoding="utf-8"), name


def test_nothing_steers_the_terminal(strange: Strange) -> None:
    printed = strange.printed + (strange.path / "log.txt").read_bytes().decode()
    assert "lost" in printed and "\\u001b" in printed
    assert not (found := STEERS.search(printed)), printed[max(found.start() - 200, 0) : found.end() + 20]


def test_a_spreadsheet_runs_nothing(strange: Strange) -> None:
    with (strange.path.parent / "p.csv").open(newline="", encoding="utf-8") as stream:
        quoted = list(csv.DictReader(stream))
    with (strange.path.parent / "raw.tsv").open(newline="", encoding="utf-8") as stream:
        raw = list(csv.DictReader(stream, delimiter="\t"))
    assert [row["id"] for row in raw] == [f"={i}+1" for i in range(24)]
    assert [row["id"] for row in quoted] == [f"'={i}+1" for i in range(24)]
    assert all(float(row["probability"]) > 0 for row in quoted)


@pytest.mark.parametrize("text", ["=1", "+1+1", "-1+1", "-A1", "@SUM(A1)", "\tx", "\rx"])
def test_every_beginning_of_a_formula_is_quoted(text: str) -> None:
    from flatshift.experiments.workflows.predict import _format_cell

    assert _format_cell(text, False) == f"'{text}" and _format_cell(text, True) == text
    assert _format_cell(-1.5, False) == -1.5 and _format_cell("a=1", False) == "a=1"


@pytest.mark.parametrize("code", [*range(0x20), 0x7F, *range(0x80, 0xA0), 0x61C, *range(0x200E, 0x2010)])
def test_every_control_character_is_escaped(code: int) -> None:
    shown = escape_control_characters(f"a{chr(code)}b")
    assert shown == (f"a{chr(code)}b" if chr(code) in "\t\n" else f"a\\u{code:04x}b")
    assert json.loads(f'"{shown}"' if chr(code) not in "\t\n" else '"a"')[0] == "a"


# ------------------------------------------------------------------------------------------------------------ templates

QUICK = ("loops", "text", "globals")


def _request(template: str) -> dict:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    known = {"return_assistant_tokens_mask": False, "add_generation_prompt": False, "tools": None}
    return {"conversations": [turns], "chat_template": template, **known, "eos_token": "</s>"}


@pytest.mark.parametrize("name", QUICK)
def test_a_hostile_template_ends_in_one_sentence(name: str, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"instruction": "Hi", "output": f"Hello {i}"} for i in range(24)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("own.jinja").write_text("{{ messages[0].content }}" + TEMPLATES[name] + "{{ eos_token }}")
    start = time.process_time(), os.times().children_user
    words = ["train", "chat", "--data", "rows.jsonl", "--task.template", "own.jinja", "--data.bad_rows", "skip"]
    assert run([*words, "--backbone", "flatshift-5m", "--out", "run", "--train.precision", "fp32"]) == 2
    err = capsys.readouterr().err.splitlines()
    assert err[-1].startswith("flatshift: error: ") and "task.template" in err[-1]
    assert len(err[-1]) < 330 and "Traceback" not in "".join(err)
    assert not Path("canary").exists()
    assert time.process_time() - start[0] < 60 and os.times().children_user - start[1] < 25


def test_an_ordinary_template_is_rendered_alike_in_the_child() -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}"
    assert render_in_child(_request(template)) == render_jinja(_request(template))
    assert render_in_child(_request("{{ 1 // 0 }}")) == render_jinja(_request("{{ 1 // 0 }}"))
    assert "line 1" in render_in_child(_request("{% if %}"))["syntax"]
    start = time.perf_counter()
    for _ in range(200):
        render_in_child(_request(template))
    assert time.perf_counter() - start < 5  # with a margin for loaded machines: about 0.2 ms each
    close_renderer()


def test_limits_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited_process, "CPU_SECONDS", 0.2)
    monkeypatch.setattr(limited_process, "MEAN_CPU_SECONDS", 0.01)
    monkeypatch.setattr(limited_process, "MEMORY", 64 << 20)

    def spin(_: object) -> None:
        while True:
            pass

    def allocate(size: int) -> str:
        try:
            return str(len(bytearray(size)))
        except MemoryError:
            return "none"

    with LimitedProcess(spin) as process, pytest.raises(LimitExceeded, match=r"than 0\.2 CPU seconds, or 0\.01 on"):
        process.ask(None)
    with LimitedProcess(lambda _: sum(range(5_000_000))) as process, pytest.raises(LimitExceeded, match="on average"):
        for _ in range(50):  # each within its own limit
            process.ask(None)
    with LimitedProcess(allocate) as process:
        assert [process.ask(size) for size in (1000, 1 << 30, 1000)] == ["1000", "none", "1000"]
    with LimitedProcess(lambda _: sorted(file.name for file in Path("/proc/self/fd").iterdir())) as process:
        assert process.ask(None) == ["0", "1", "2", "3", "4"]  # the last lists the directory
    with LimitedProcess(lambda _: os.abort()) as process, pytest.raises(LimitExceeded, match="or ends its process"):
        process.ask(None)


# ----------------------------------------------------------------------------------------------------------- tokenizers


def test_a_runaway_tokenizer_ends_in_one_sentence(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = backbone_directory("flatshift-5m")
    assert shipped is not None
    shutil.copytree(shipped, "own")
    file = Path("own/tokenizer.json")
    file.write_text(
        json.dumps({**json.loads(file.read_text(encoding="utf-8")), **TOKENIZERS["growth"]}), encoding="utf-8"
    )
    Path("rows.jsonl").write_text("".join(f'{{"text": "a banana of {i}"}}\n' for i in range(24)))
    words = ["train", "language-model", "--backbone", "./own", "--data", "rows.jsonl", "--out", "run"]
    assert run([*words, "--train.precision", "fp32"]) == 2
    err = capsys.readouterr().err.splitlines()
    assert "tokenizer" in err[-1] and len(err[-1]) < 330 and "Traceback" not in "".join(err)
