"""The commands of the pages about evaluation run as they stand; prompts and metrics that they name are there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from flatshift.cli import run
from flatshift.experiments.recipe.build import build_settings
from flatshift.experiments.recipe.tree import parse
from flatshift.finetune.evaluate.metrics import metric_names
from flatshift.finetune.evaluate.prompts import Prompt, shipped_prompts
from tests.cli.test_eval_side_by_side import trained

DOCS = Path(__file__).resolve().parents[2] / "docs"
NAMES = ("languages.md", "tokenizers.md", "few-shot.md", "probes.md")
PAGES = {name: (DOCS / name).read_text(encoding="utf-8") for name in NAMES}
COMMANDS = [
    line
    for page in PAGES.values()
    for block in re.findall(r"```sh\n(.*?)```", page, re.S)
    for line in block.splitlines()
]


def test_there_are_commands_on_every_page():
    assert len(COMMANDS) >= 5 and all(line.startswith("flatshift ") for line in COMMANDS)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_run(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if "runs/german" in command:
        trained(tmp_path / "runs" / "german", "language-model", **{"data.dev.files": "[]", "data.test.files": "[]"})
    if "tokenizer train" in command:
        command += " --bytes 20000 --seeds 1"  # the whole takes ten minutes of a core
    assert run(shlex.split(command)[1:]) == 0


def test_the_quick_commands_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (command,) = [line for line in COMMANDS if line.startswith("flatshift tokenizer flatshift")]
    assert run(shlex.split(command)[1:]) == 0
    said = capsys.readouterr().out
    assert "de German" in said and "parity" in said


def test_the_prompt_on_the_page_is_one():
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGES["few-shot.md"], re.S)
    prompt = build_settings(Prompt, parse(block, "few-shot.md"))
    assert set(prompt.labels) == {"entailment", "neutral", "contradiction"} and "de" in prompt.wordings


def test_prompts_and_metrics_are_named():
    page = PAGES["few-shot.md"]
    assert all(f"`{name}`" in page for name in shipped_prompts())
    assert all(f"`{name}`" in page for name in metric_names("agreement"))
