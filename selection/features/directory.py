"""Directory of feature shards, as written by cluster jobs and read by `--pool-features DIR`; format for other writers:
docs/feature-shards.md.

`manifest.json` lists the shards; `NAME.npy` holds the rows of a shard, `NAME.ids`, if present, one id per line (UTF-8).
Shards are concatenated in the order of the manifest. Every file is checked against the manifest by header, length and
SHA-256 before a row is used, and ids must be unique.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from flatshift.selection.errors import SelectionError
from flatshift.selection.features.matrix import ShardedRows, load_features

MANIFEST, FORMAT, VERSION = "manifest.json", "flatshift features", 1
TYPES = ("float16", "float32", "float64")


class FeatureDirectory(ShardedRows):
    """Rows of all shards, (rows, dim), read on demand."""

    def __init__(self, directory: Path, manifest: dict[str, Any]):
        shards = manifest["shards"]
        files = [directory / shard["file"] for shard in shards]
        super().__init__(files, [shard["rows"] for shard in shards], manifest["dim"], manifest["dtype"])
        self.directory = directory
        self.has_ids: bool = manifest["ids"]

    def ids(self) -> Iterator[str]:
        """Yield every row's id, in order; nothing if there are no ids."""
        for file in self.files if self.has_ids else ():
            yield from _read_lines(file.with_suffix(".ids"))


def write_manifest(directory: str | Path) -> Path:
    """Write the manifest of the shards `*.npy` in `directory`, in the order of their names; return its path.

    Raises SelectionError for shards that do not match, and for .ids files that are missing for some shards or have
    another number of lines.
    """
    root = Path(directory)
    files = sorted(root.glob("*.npy"))
    if not files:
        raise SelectionError(f"{root} holds no .npy files; write the shards first")
    with_ids = [file.with_suffix(".ids").is_file() for file in files]
    if any(with_ids) and not all(with_ids):
        bare = files[with_ids.index(False)].name
        raise SelectionError(f"{root}: {bare} has no .ids file and other shards have; give all of them ids, or none")
    shards: list[dict[str, Any]] = []
    first = load_features(files[0], flag="shard")
    for file in files:
        matrix = load_features(file, flag="shard")
        shard: dict[str, Any] = {"file": file.name, "rows": len(matrix), "sha256": _file_digest(file)}
        if with_ids[0]:
            names = file.with_suffix(".ids")
            if (count := sum(1 for _ in _read_lines(names))) != len(matrix):
                raise SelectionError(f"{names} has {count} ids for {len(matrix)} rows; give one a line for each row")
            shard["ids_sha256"] = _file_digest(names)
        if (matrix.shape[1], matrix.dtype) != (first.shape[1], first.dtype):
            raise SelectionError(
                f"{file}: {matrix.shape[1]} columns of {matrix.dtype}, and {files[0].name} has {first.shape[1]} of "
                f"{first.dtype}; write all shards alike"
            )
        shards.append(shard)
    told = {
        "format": FORMAT,
        "version": VERSION,
        "rows": sum(shard["rows"] for shard in shards),
        "dim": first.shape[1],
        "dtype": str(first.dtype),
        "ids": with_ids[0],
        "shards": shards,
    }
    path, scratch = root / MANIFEST, root / f".{MANIFEST}.tmp"
    with scratch.open("w", encoding="utf-8") as handle:
        json.dump(told, handle, indent=1)
        handle.flush()
        os.fsync(handle.fileno())
    scratch.replace(path)
    return path


def open_directory(directory: str | Path, flag: str = "features") -> FeatureDirectory:
    """Open a directory and check its shards; an unchanged directory is checked once per process.

    Raises SelectionError: a manifest that is missing or has another format or version; a shard that is missing,
    truncated, of another dim or dtype than in the manifest, or changed since; a repeated id.
    """
    root = Path(directory)
    path = root / MANIFEST
    try:
        status = path.stat()
    except OSError:
        raise SelectionError(
            f"{flag}: {root} has no {MANIFEST}; `flatshift.selection.features.write_manifest` writes it when all "
            "shards are there"
        ) from None
    return _open_checked(root, flag, status.st_mtime_ns, status.st_size)


# The unused arguments are part of the cache key: a changed manifest is checked again.
@functools.lru_cache(maxsize=8)
def _open_checked(root: Path, flag: str, _changed: int, _size: int) -> FeatureDirectory:
    manifest = read_manifest(root / MANIFEST, flag)
    for shard in manifest["shards"]:
        _check_shard(root, shard, manifest, flag)
    rows = sum(shard["rows"] for shard in manifest["shards"])
    if rows != manifest["rows"]:
        raise SelectionError(
            f"{flag}: {root / MANIFEST} says {manifest['rows']} rows, its shards {rows}; seal it again"
        )
    found = FeatureDirectory(root, manifest)
    if (twin := _first_repeated_id(found)) is not None:
        raise SelectionError(f"{flag}: {root}: the id {twin!r} comes twice; a record belongs into one shard, once")
    return found


def read_manifest(path: Path, flag: str) -> dict[str, Any]:
    """Read and validate a directory's manifest, without its shards. Raises SelectionError if it is invalid."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["format"] != FORMAT:
            raise ValueError(f"its format is {found['format']!r}, not {FORMAT!r}")
        if found["version"] != VERSION:
            raise ValueError(f"its version is {found['version']!r}, and this Flatshift reads {VERSION}")
        if found["dtype"] not in TYPES:
            raise ValueError(f"its dtype is {found['dtype']!r}, not one of {', '.join(TYPES)}")
        if not isinstance(found["ids"], bool) or not found["shards"]:
            raise ValueError("it must list shards, and say by true or false whether they have ids")
        counts = [found["rows"], found["dim"], *(shard["rows"] for shard in found["shards"])]
        if not all(type(count) is int and count > 0 for count in counts):
            raise ValueError("rows and dim must be whole numbers above 0")
        names = [shard["file"] for shard in found["shards"]]
        digests = [shard[key] for shard in found["shards"] for key in ("sha256", *["ids_sha256"] * found["ids"])]
        if not all(isinstance(text, str) for text in (*names, *digests)):
            raise ValueError("files and digests must be texts")
        if any(Path(name).name != name or not name.endswith(".npy") for name in names) or len(set(names)) < len(names):
            raise ValueError("shards must be different .npy files next to it")
    except KeyError as error:
        raise SelectionError(f"{flag}: {path} lacks {error.args[0]!r}; seal the directory again") from None
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        told = (str(error).splitlines() or ["unreadable"])[0][:160]
        raise SelectionError(f"{flag}: {path} cannot be used: {told}; seal the directory again") from None
    return dict(found)


def _check_shard(root: Path, shard: dict[str, Any], manifest: dict[str, Any], flag: str) -> None:
    file = root / shard["file"]
    matrix = load_features(file, flag=flag)
    has, says = (len(matrix), matrix.shape[1], str(matrix.dtype)), (shard["rows"], manifest["dim"], manifest["dtype"])
    for what, one, other in zip(("rows", "columns", "dtype"), has, says, strict=True):
        if one != other:
            raise SelectionError(
                f"{flag}: {file} has {what} {one}, and {MANIFEST} says {other}; write the shard again, then seal again"
            )
    pairs = [(file, shard["sha256"])]
    if manifest["ids"]:
        pairs.append((file.with_suffix(".ids"), shard["ids_sha256"]))
    for path, digest in pairs:
        if not path.is_file():
            raise SelectionError(f"{flag}: {path} does not exist, and {MANIFEST} lists it; write it, then seal again")
        if _file_digest(path) != digest:
            raise SelectionError(
                f"{flag}: {path} is not what {MANIFEST} says (SHA-256); write it again, then seal again"
            )
    if manifest["ids"] and (count := sum(1 for _ in _read_lines(pairs[1][0]))) != shard["rows"]:
        raise SelectionError(f"{flag}: {pairs[1][0]} has {count} ids for {shard['rows']} rows; give one a line")


def _file_digest(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _read_lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8", newline="\n") as handle:
            for line in handle:
                yield line.removesuffix("\n")
    except UnicodeDecodeError:
        raise SelectionError(f"{path} is not UTF-8; write one id a line in UTF-8") from None


def _first_repeated_id(rows: FeatureDirectory) -> str | None:
    """Return the first repeated id, or None. Takes 8 bytes per id; names are compared only where digests collide."""
    if not rows.has_ids:
        return None

    def key(name: str) -> bytes:
        return hashlib.blake2b(name.encode(), digest_size=8).digest()

    keys = np.empty(len(rows), dtype=np.uint64)
    for i, name in enumerate(rows.ids()):
        keys[i] = int.from_bytes(key(name), "little")
    keys.sort()
    again = {int(k).to_bytes(8, "little") for k in np.unique(keys[1:][keys[1:] == keys[:-1]])}
    seen: set[str] = set()
    for name in rows.ids() if again else ():
        if key(name) in again:
            if name in seen:
                return name
            seen.add(name)
    return None
