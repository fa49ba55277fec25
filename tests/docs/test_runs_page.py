"""The commands and the block of docs/runs.md, on two run directories."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from flatshift.cli import run
from tests.experiments.report.test_side_by_side import make_run

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "runs.md").read_text(encoding="utf-8")


def test_what_the_page_shows_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(Path("runs/first"), ["x", "y", "x", "x", "y", "x"], rank=1)
    make_run(Path("runs/second"), ["x", "x", "y", "y", "y", "y"], rank=2)
    for line in re.findall(r"```bash\n(.*?)```", PAGE, flags=re.S)[0].splitlines():
        assert run(shlex.split(line, comments=True)[1:]) == 0, line
    said = capsys.readouterr()
    assert "first" in said.out and "comparison.html" in said.out and "paired" not in said.err
    exec(compile(re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)[0], "page", "exec"), {})
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert len(shown) == 3 and all(words[2] == "→" and words[1] != words[3] for words in shown)
    assert [words[4] for words in shown] == sorted((words[4] for words in shown), reverse=True)
