"""Which code made a result: the version, and a fingerprint of the source that a cell's figures come from."""

from __future__ import annotations

import functools
import hashlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("experiments", "finetune", "regularizers", "selection")
_SHOWS = ("experiments/report/", "experiments/results/", "experiments/statistics/", "experiments/studies/compare/")
"""What reads and shows results: no figure of a sweep comes from there."""


def flatshift_version() -> str:
    """The installed distribution's version."""
    try:
        return version("flatshift")
    except PackageNotFoundError:
        return "uninstalled"


@functools.cache
def source_digest() -> str:
    """12 hex digits of the Python files that a cell runs through, as they lie on disk when first asked."""
    digest = hashlib.sha256()
    for package in _PACKAGES:
        for path in sorted((_ROOT / package).rglob("*.py")):
            name = path.relative_to(_ROOT).as_posix()
            if not name.startswith(_SHOWS):
                data = path.read_bytes()
                digest.update(f"{name}\x1f{len(data)}\x1f".encode())
                digest.update(data)
    return digest.hexdigest()[:12]
