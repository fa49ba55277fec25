"""Every way out has its command on the page on handing over; tests/docs/test_blocks.py reads their flags, and
tests/cli/test_outputs.py, tests/cli/test_hand_over.py and tests/cli/test_harness.py run them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "out.md").read_text(encoding="utf-8")
COMMANDS = [
    line
    for block in re.findall(r"```bash\n(.*?)```", PAGE, flags=re.S)
    for line in block.splitlines()
    if line.startswith("flatshift ")
]


def test_every_way_out_is_there() -> None:
    verbs = {shlex.split(command)[1] for command in COMMANDS}
    assert verbs >= {"generate", "merge", "export", "push", "eval"}
    assert {f"--to {to}" for to in ("gguf", "ollama", "vllm")} <= {
        m for c in COMMANDS for m in re.findall(r"--to \w+", c)
    }
