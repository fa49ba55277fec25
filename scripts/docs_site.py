"""mkdocs hooks: build the tabs of the site from the headings of docs/index.md, and add linked files outside docs/.

make docs        # builds site/ from docs/, strictly: a broken link fails it
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
_LINK = re.compile(r"\]\((?P<target>[^)#\s:]+)(?P<anchor>#[^)\s]*)?\)")


def read_sections() -> dict[str, list[tuple[str, str]]]:
    """Return heading of docs/index.md → (question, page) of each row of its table; a page is a path from docs/."""
    found: dict[str, list[tuple[str, str]]] = {}
    for line in (DOCS / "index.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            found[line[3:]] = []
        elif found and line.startswith("| ") and "](" in line:
            question, page = (cell.strip() for cell in line.strip("| ").split(" | "))
            rows = _LINK.finditer(page)
            found[next(reversed(found))] += [(question, match["target"]) for match in rows]
    return found


def find_linked_files() -> dict[str, Path]:
    """Return the files outside docs/ that its pages or one another link to: path in the site → file."""
    found: dict[str, Path] = {}
    queue = sorted(DOCS.glob("*.md"))
    while queue:
        page = queue.pop()
        for match in _LINK.finditer(page.read_text(encoding="utf-8")):
            target = (page.parent / match["target"]).resolve()
            if target.is_file() and not target.is_relative_to(DOCS) and target.is_relative_to(ROOT):
                name = _site_path(target)
                if name not in found:
                    found[name] = target
                    queue += [target] if target.suffix == ".md" else []
    return found


def _site_path(path: Path) -> str:
    """Return the path in the site of a repository file; a README does not become the index of its folder."""
    inside = path.relative_to(DOCS if path.is_relative_to(DOCS) else ROOT).as_posix()
    if inside == "README.md":
        return "readme.md"
    if path.name == "README.md":
        return inside.removesuffix("/README.md") + ".md"
    return inside if path.suffix else inside + ".md"


def on_config(config: Any) -> Any:
    """Set the navigation: a tab for each heading, an entry for each question."""
    config.nav = [{"Start": "index.md"}]
    for heading, rows in read_sections().items():
        pages = dict.fromkeys(_site_path((DOCS / page).resolve()) for _, page in rows)
        config.nav.append({heading: list(pages)})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the files outside docs/ that the pages link to."""
    from mkdocs.structure.files import File

    for name, path in find_linked_files().items():
        files.append(File.generated(config, name, content=path.read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Convert links that are valid in the repository to links of the site."""
    here = {name: path for name, path in find_linked_files().items()}.get(page.file.src_uri, DOCS / page.file.src_uri)

    def moved(match: re.Match[str]) -> str:
        target = (here.parent / match["target"]).resolve()
        if not target.is_file() or not target.is_relative_to(ROOT):
            return match[0]
        link = os.path.relpath(_site_path(target), Path(page.file.src_uri).parent)
        return f"]({link}{match['anchor'] or ''})"

    return _LINK.sub(moved, markdown)
