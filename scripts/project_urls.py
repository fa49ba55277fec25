"""Hatchling's hook for the project's links: their address is PROJECT_URL when a release is built.

PROJECT_URL=https://github.com/OWNER/flatshift make release
"""

from __future__ import annotations

import os
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class ProjectUrls(MetadataHookInterface):
    """Links of the package's metadata under PROJECT_URL; none without it."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add `urls` to `metadata`."""
        address = os.environ.get("PROJECT_URL", "").rstrip("/")
        pages = {"Source": "", "Documentation": "/tree/main/docs", "Changelog": "/blob/main/CHANGELOG.md"}
        metadata["urls"] = {name: address + page for name, page in pages.items()} if address else {}
