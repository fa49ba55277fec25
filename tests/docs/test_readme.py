"""The README is executed: its recipe is written, its commands are run in order, on a user's own small directory."""

from __future__ import annotations

import json
import lzma
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import HANG_S

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SHORT = [
    "--train.steps",
    "4",
    "--train.eval_every",
    "0",
    "--warmup.steps",
    "3",
    "--train.max_length",
    "48",
    "--train.max_cut",
    "1",
]
SHORT += ["--train.precision", "fp32"]


def blocks(language: str) -> list[str]:
    """Fenced blocks of one language, in order."""
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.S)


def commands() -> list[str]:
    """Every `flatshift` command of the bash blocks."""
    return [line for block in blocks("bash") for line in block.splitlines() if line.startswith("flatshift ")]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's directory: pool.jsonl and target.jsonl, nothing else."""
    home = tmp_path_factory.mktemp("mine")
    samples = ROOT / "finetune" / "samples"
    for name, source, count in (("pool", "pool.jsonl.xz", 600), ("target", "banking/train.jsonl.xz", 120)):
        with lzma.open(samples / source, "rt", encoding="utf-8") as handle:
            rows = [json.loads(line) for _, line in zip(range(count), handle, strict=False)]
        kept = [{k: row[k] for k in ("text", "label") if k in row} for row in rows]
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept)
        (home / f"{name}.jsonl").write_text(text, encoding="utf-8")
    (home / "mine.yaml").write_text(blocks("yaml")[0], encoding="utf-8")
    return home


def test_the_readme_has_the_whole_way() -> None:
    verbs = [shlex.split(command)[1] for command in commands()]
    for verb in ("select", "train", "eval", "report", "sweep"):
        assert verb in verbs


def test_the_commands_run_in_order(directory: Path) -> None:
    for command in commands():
        words = shlex.split(command)[1:]
        if words[0] in ("train", "sweep") and "--resume" not in words:
            words += SHORT
        if "--seeds" in words:
            words[words.index("--seeds") + 1] = "1"
        result = subprocess.run(
            [sys.executable, "-m", "flatshift", *words], cwd=directory, capture_output=True, text=True, timeout=HANG_S
        )
        assert result.returncode == 0, f"{command}\n{result.stderr[-3000:]}"
    assert (directory / "picked" / "scores.parquet").is_file()
    assert len((directory / "picked" / "selected.jsonl").read_text(encoding="utf-8").splitlines()) == 200
    assert (directory / "run" / "adapter" / "adapter_model.safetensors").is_file()
    assert (directory / "report.html").read_text(encoding="utf-8").lstrip().lower().startswith("<!doctype html>")
    assert "test" in json.loads((directory / "run" / "eval.json").read_text(encoding="utf-8"))
    assert (directory / "ranks" / "cells.parquet").is_file()


def test_links_point_at_something() -> None:
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make (\w+)", README, flags=re.M):
        assert re.search(rf"^{target}:", makefile, flags=re.M), target
