"""Pictures of README and docs show pages as the report draws them today, section by section."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from flatshift.experiments.report.page import build_report
from scripts.draw_pictures import PAGES, PICTURES, read_headings
from tests.support import report_runs

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", PAGES)
def test_pictures_are_of_todays_sections(name: str, tmp_path: Path) -> None:
    """What a made-up run of that kind shows must be in the picture's page, which is of a real one and shows more."""
    report_runs.demo(tmp_path / "demo")
    folder = tmp_path / "demo" / PAGES[name][0]
    now = read_headings(build_report([folder], out=folder / "report.html"))
    shown = json.loads((PICTURES / "pictures.json").read_text(encoding="utf-8"))[name]
    assert now and [title for title in shown if title in now] == now, "draw them anew: scripts/draw_pictures.py"
    assert (PICTURES / f"{name}.png").stat().st_size < 400_000


def test_every_picture_is_used() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    used = {
        Path(target).name for page in pages for target in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text("utf-8"))
    }
    assert {f"{name}.png" for name in PAGES} <= used
