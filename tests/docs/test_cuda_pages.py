"""Every page that speaks of CUDA says, in one form, that nothing has run there; until a result says otherwise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SAID = "Nothing here has run on a CUDA device yet"
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_that_speaks_of_cuda_says_what_has_run_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    if "cuda" not in text.lower():
        return
    place = "docs/cuda.md" if page.name == "README.md" else "cuda.md"
    link = "." if page.name == "cuda.md" else f": [what is known without one]({place})."
    assert text.count(SAID) == 1 and f"{SAID}{link}" in text, f"{page.name}: say `{SAID}{link}`"


def test_it_is_true() -> None:
    for file in (ROOT / "benchmarks" / "results").glob("*.json"):
        machine = json.loads(file.read_text(encoding="utf-8"))["machine"]
        assert not machine.get("gpu"), f"{file.name} ran on {machine['gpu']}: say so on the pages, and here"
