"""Every command of the page on handing over has the flags that the page gives it; tests/cli/test_outputs.py,
tests/cli/test_hand_over.py and tests/cli/test_harness.py run them."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest

from flatshift.command_line import parse

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "out.md").read_text(encoding="utf-8")
COMMANDS = [
    line
    for block in re.findall(r"```bash\n(.*?)```", PAGE, flags=re.S)
    for line in block.splitlines()
    if line.startswith("flatshift ")
]


@pytest.mark.parametrize("command", COMMANDS)
def test_its_flags_are_the_commands_own(command: str) -> None:
    _, verb, *words = shlex.split(command)
    module = importlib.import_module(f"flatshift.commands.{verb}")
    assert parse(module.Flags, verb, words) is not None


def test_every_way_out_is_there() -> None:
    verbs = {shlex.split(command)[1] for command in COMMANDS}
    assert verbs >= {"generate", "merge", "export", "push", "eval"}
    assert {f"--to {to}" for to in ("gguf", "ollama", "vllm")} <= {
        m for c in COMMANDS for m in re.findall(r"--to \w+", c)
    }
