"""Cache directory shared by runs: its location, size limit and pruning. Imports nothing heavy."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from .atomic import remove_leftovers, write_json
from .errors import UserError

PLACE, LIMIT = "FLATSHIFT_CACHE", "FLATSHIFT_CACHE_GIB"
ENTRY = "tokens-"
ABOUT = "about.json"
_LIMIT_GIB = 20.0


class CacheEntry(NamedTuple):
    """One entry of the cache."""

    path: Path
    bytes: int
    used: float
    """Time of last use, seconds since the epoch."""


def cache_root() -> Path:
    """Return `$FLATSHIFT_CACHE`, else `flatshift` in the user's cache directory (XDG)."""
    configured = os.environ.get(PLACE)
    if configured:
        return Path(configured).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "flatshift"


def cache_limit() -> int:
    """Return the size limit of a cache in bytes: `$FLATSHIFT_CACHE_GIB`, by default 20 GiB. Raises UserError if it is
    not a number."""
    text = os.environ.get(LIMIT)
    try:
        gib = float(text) if text else _LIMIT_GIB
        if not 0 <= gib < 1e9:
            raise ValueError
    except ValueError:
        raise UserError(f"{LIMIT}: {text!r} is not a size in GiB; give a number, for example 20") from None
    return int(gib * 2**30)


def write_cached_json(path: Path, value: Any) -> None:
    """Write `value` as JSON to a cache file, ignoring failures: a missing entry only costs time.

    Leftovers of a killed write of the same entry are removed first; a concurrent writer of that entry only loses its
    write.
    """
    try:
        remove_leftovers(path.parent, name=path.name)
        write_json(path, value)
    except (OSError, ValueError):
        return


def list_cache_entries(root: Path) -> list[CacheEntry]:
    """Return the entries in `root`, most recently used last."""
    entries = []
    for path in root.glob(f"{ENTRY}*") if root.is_dir() else ():
        try:
            used = (path / ABOUT).stat().st_mtime
            size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        except OSError:
            continue  # another process is just removing it
        entries.append(CacheEntry(path, size, used))
    return sorted(entries, key=lambda entry: entry.used)


def prune_cache(root: Path, *, limit: int, current: Path) -> int:
    """Remove entries, least recently used first, until `root` holds at most `limit` bytes; never remove `current`.

    Returns the number of removed entries. A process that has one open can still read it (POSIX).
    """
    entries = list_cache_entries(root)
    total, removed = sum(entry.bytes for entry in entries), 0
    for entry in entries:
        if total <= limit:
            break
        if entry.path != current:
            shutil.rmtree(entry.path, ignore_errors=True)
            total -= entry.bytes
            removed += 1
    return removed
