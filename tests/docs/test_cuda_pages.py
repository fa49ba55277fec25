"""docs/cuda.md alone states that nothing has run on a CUDA device, until a result says otherwise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTE = "Nothing here has run on a CUDA device yet"
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_one_page_states_what_has_run_on_cuda(page: Path) -> None:
    assert page.read_text(encoding="utf-8").count(NOTE) == (page.name == "cuda.md")


def test_it_is_true() -> None:
    for file in (ROOT / "benchmarks" / "results").glob("*.json"):
        machine = json.loads(file.read_text(encoding="utf-8"))["machine"]
        assert not machine.get("gpu"), f"{file.name} ran on {machine['gpu']}: say so on the pages, and here"
