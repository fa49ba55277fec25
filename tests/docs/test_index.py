"""Every page of docs/ is found from its index, and no relative link of a page leads nowhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "finetune" / "samples" / "README.md",
]


def links(page: Path) -> set[Path]:
    """Targets of the page's relative links, without anchors."""
    found = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    return {(page.parent / target).resolve() for target in found if "://" not in target}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert [str(target) for target in sorted(links(page)) if not target.exists()] == []


def test_index_lists_every_page() -> None:
    index = ROOT / "docs" / "index.md"
    missing = set((ROOT / "docs").rglob("*.md")) - links(index) - {index}
    assert not missing, f"docs/index.md does not list {sorted(page.name for page in missing)}"


def anchors(page: Path) -> set[str]:
    """The anchors of the page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    headings = [re.sub(r"\]\([^)]*\)", "", heading).strip() for heading in re.findall(r"^#+ (.*)", text, flags=re.M)]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_anchors_are_headings(page: Path) -> None:
    found = re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", page.read_text(encoding="utf-8"))
    places = [(page if not target else (page.parent / target).resolve(), anchor) for target, anchor in found]
    assert not [f"{path.name}#{anchor}" for path, anchor in places if anchor not in anchors(path)]


def test_contributing_fits_on_a_screen() -> None:
    lines = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 120
