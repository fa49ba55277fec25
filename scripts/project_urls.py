"""Hatchling's hook for the project's links: their address is PROJECT_URL when a release is built.

PROJECT_URL=https://github.com/OWNER/flatshift make release
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_RELATIVE_LINK = re.compile(r"(?P<picture>!?)(?P<title>\[[^][]*\])\((?P<target>[^)#\s:]+)(?P<anchor>#[^)\s]*)?\)")


class ProjectUrls(MetadataHookInterface):
    """Links of the package's metadata and README under PROJECT_URL; without it none, and the README as it is."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add `urls` and `readme` to `metadata`."""
        address = os.environ.get("PROJECT_URL", "").rstrip("/")
        pages = {
            "Source": "",
            "Documentation": "/tree/main/docs",
            "Changelog": "/blob/main/CHANGELOG.md",
            "Issues": "/issues",
        }
        metadata["urls"] = {name: address + page for name, page in pages.items()} if address else {}
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        if address:
            text = absolute_links(text, address, f"v{metadata['version']}")
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def absolute_links(markdown: str, address: str, revision: str) -> str:
    """Convert relative links to those of a repository on GitHub at a tag or branch: a package index has no files."""

    def absolute(match: re.Match[str]) -> str:
        kind = "raw" if match["picture"] else "blob"
        link = f"{address}/{kind}/{revision}/{match['target']}{match['anchor'] or ''}"
        return f"{match['picture']}{match['title']}({link})"

    return _RELATIVE_LINK.sub(absolute, markdown)
