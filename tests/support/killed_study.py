"""Kill -9 of a study's command in the middle, and the same command again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.support.patience import HANG_S

COMPARE = ("flatshift", "compare")
SELECTORS = ("benchmarks.studies.selection_quality",)


def start(command: tuple[str, ...], recipe: Path, out: Path, jobs: int, *flags: str) -> subprocess.Popen:
    """A study's command on `recipe`, whose rows lie beside it."""
    return subprocess.Popen(
        [sys.executable, "-m", *command, str(recipe), "--out", str(out), "--data", str(recipe.parent),
         "--jobs", str(jobs), *flags],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def kill_and_go_on(command: tuple[str, ...], recipe: Path, out: Path, *flags: str, cells: int) -> tuple[str, str]:
    """Kill two workers' study after `cells` cells, run it to its end, and return what that printed and said.

    The cells that the first had finished are still there afterwards, byte for byte, and no torn file is.
    """
    first = start(command, recipe, out, 2, *flags)
    deadline = time.monotonic() + HANG_S
    while len(_results(out)) < cells:
        assert first.poll() is None and time.monotonic() < deadline, first.communicate()[1]
        time.sleep(0.05)
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    time.sleep(1.5)  # the workers notice that their parent is gone
    kept = _results(out)
    again = start(command, recipe, out, 1, *flags)
    printed, said = again.communicate(timeout=HANG_S)
    assert again.returncode == 0, said
    assert len(kept) >= cells and all(file.read_bytes() == text for file, text in kept.items())
    assert "cells" in said and "report.html" in printed
    assert not list((out / "cells").rglob(".*.tmp"))
    return printed, said


def _results(out: Path) -> dict[Path, bytes]:
    """The results of the cells that have ended, each in its cell's directory or in a file of the cell's name."""
    found = [*(out / "cells").glob("*.json"), *(out / "cells").glob("*/result.json")]
    return {file: file.read_bytes() for file in found}
