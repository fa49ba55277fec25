"""Directory of feature shards, as written by cluster jobs and read by `--pool-features DIR`; format for other writers:
docs/feature-shards.md.

`manifest.json` lists the shards; `NAME.npy` holds the rows of a shard, `NAME.ids`, if present, one id per line (UTF-8).
Shards are concatenated in the order of the manifest. Every file is checked against the manifest by header, length and
SHA-256 before a row is used, and ids must be unique.

`ShardWriter` writes one shard per file of documents, for any data engine, as a step of a datatrove pipeline:

    LocalPipelineExecutor([JsonlReader("pool"), ShardWriter("features", HashedNgrams())], tasks=files, …).run()
    write_manifest("features")

datatrove takes any callable of (documents, rank, world_size) as a step; it is not imported here.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from flatshift.selection.errors import SelectionError
from flatshift.selection.features.cache import atomic_file
from flatshift.selection.features.matrix import ShardedRows, load_features

MANIFEST, FORMAT, VERSION = "manifest.json", "flatshift features", 1
TYPES = ("float16", "float32", "float64")
_BATCH = 512


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

    Raises SelectionError for shards that do not match, and for .ids files that are missing or have another number of
    lines.
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
    if str(first.dtype) not in TYPES:
        raise SelectionError(f"{files[0]}: rows of {first.dtype} are not read; write it as float32")
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
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "rows": sum(shard["rows"] for shard in shards),
        "dim": first.shape[1],
        "dtype": str(first.dtype),
        "ids": with_ids[0],
        "shards": shards,
    }
    with atomic_file(root / MANIFEST) as handle:
        handle.write(json.dumps(manifest, indent=1).encode())
    return root / MANIFEST


def open_directory(directory: str | Path, flag: str = "features") -> FeatureDirectory:
    """Open a directory and check its shards; an unchanged directory is checked once per process.

    Raises SelectionError: a manifest that is missing or has another format or version; a shard that is missing,
    truncated, of another dim or dtype than in the manifest, or changed since; a repeated id.
    """
    root = Path(directory)
    try:
        status = (root / MANIFEST).stat()
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
    features = FeatureDirectory(root, manifest)
    if (twin := _first_repeated_id(features)) is not None:
        raise SelectionError(f"{flag}: {root}: the id {twin!r} comes twice; a record belongs into one shard, once")
    return features


def read_manifest(path: Path, flag: str) -> dict[str, Any]:
    """Read and validate a directory's manifest, without its shards. Raises SelectionError if it is invalid."""
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise ValueError(f"its format is {manifest['format']!r}, not {FORMAT!r}")
        if manifest["version"] != VERSION:
            raise ValueError(f"its version is {manifest['version']!r}, and this Flatshift reads {VERSION}")
        if manifest["dtype"] not in TYPES:
            raise ValueError(f"its dtype is {manifest['dtype']!r}, not one of {', '.join(TYPES)}")
        shards, has_ids = manifest["shards"], manifest["ids"]
        if not isinstance(has_ids, bool) or not shards:
            raise ValueError("it must list shards, and say by true or false whether they have ids")
        counts = [manifest["rows"], manifest["dim"], *(shard["rows"] for shard in shards)]
        if not all(type(count) is int and count > 0 for count in counts):
            raise ValueError("rows and dim must be whole numbers above 0")
        names = [shard["file"] for shard in shards]
        digests = [shard[key] for shard in shards for key in ("sha256", *["ids_sha256"] * has_ids)]
        if not all(isinstance(text, str) for text in (*names, *digests)):
            raise ValueError("files and digests must be texts")
        if any(Path(name).name != name or not name.endswith(".npy") for name in names) or len(set(names)) < len(names):
            raise ValueError("shards must be different .npy files next to it")
    except KeyError as error:
        raise SelectionError(f"{flag}: {path} lacks {error.args[0]!r}; seal the directory again") from None
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        reason = (str(error).splitlines() or ["unreadable"])[0][:160]
        raise SelectionError(f"{flag}: {path} cannot be used: {reason}; seal the directory again") from None
    return dict(manifest)


def _check_shard(root: Path, shard: dict[str, Any], manifest: dict[str, Any], flag: str) -> None:
    file = root / shard["file"]
    matrix = load_features(file, flag=flag)
    for name, value, listed in (
        ("rows", len(matrix), shard["rows"]),
        ("columns", matrix.shape[1], manifest["dim"]),
        ("dtype", str(matrix.dtype), manifest["dtype"]),
    ):
        if value != listed:
            raise SelectionError(
                f"{flag}: {file} has {name} {value}, and {MANIFEST} says {listed}; write the shard again, then seal "
                "again"
            )
    digests = {file: shard["sha256"]}
    ids = file.with_suffix(".ids")
    if manifest["ids"]:
        digests[ids] = shard["ids_sha256"]
    for path, digest in digests.items():
        if not path.is_file():
            raise SelectionError(f"{flag}: {path} does not exist, and {MANIFEST} lists it; write it, then seal again")
        if _file_digest(path) != digest:
            raise SelectionError(
                f"{flag}: {path} is not what {MANIFEST} says (SHA-256); write it again, then seal again"
            )
    if manifest["ids"] and (count := sum(1 for _ in _read_lines(ids))) != shard["rows"]:
        raise SelectionError(f"{flag}: {ids} has {count} ids for {shard['rows']} rows; give one a line")


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

    def key(name: str) -> int:
        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")

    keys = np.sort(np.fromiter(map(key, rows.ids()), np.uint64, len(rows)))
    shared = set(keys[1:][keys[1:] == keys[:-1]].tolist())
    previous: set[str] = set()
    for name in rows.ids() if shared else ():
        if key(name) in shared:
            if name in previous:
                return name
            previous.add(name)
    return None


class Document(Protocol):
    """Document as given by datatrove's readers."""

    text: str
    id: str
    metadata: dict[str, Any]


class ShardWriter:
    """Writes `part-<rank>.npy` and `part-<rank>.ids` into a directory for `write_manifest`; passes documents on.

    directory: of the shards. embed: texts → (n, dim), the same in every task; it is pickled for them. dtype: of the
    stored rows. ids: also write ids, so that a shuffled shard can be matched later. The rows of one task are held in
    memory; files are written atomically, rows last. If several tasks share the work, each has to read one file, so that
    the order of shards is that of the files.

    Raises SelectionError for a task that reads a second file while there are other tasks, an id with a line break, and
    features of another number of rows.
    """

    def __init__(
        self,
        directory: str | Path,
        embed: Callable[[Sequence[str]], np.ndarray],
        *,
        dtype: Literal["float16", "float32", "float64"] = "float32",
        ids: bool = True,
    ):
        self.directory, self.embed, self.dtype, self.ids = Path(directory).absolute(), embed, dtype, ids

    def __call__(self, documents: Iterable[Document], rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Yield the documents of a task, and write its shard at their end."""
        rows: list[np.ndarray] = []
        ids: list[str] = []
        file: str | None = None
        stream = iter(documents)
        while batch := list(islice(stream, _BATCH)):
            for document in batch:
                path = document.metadata.get("file_path")
                if world_size > 1 and file is not None and path != file:
                    raise SelectionError(
                        f"task {rank} of {world_size} reads {file} and {path}; give the executor as many tasks as "
                        "there are files, so that shards follow one another as the files do"
                    )
                file = path
                if self.ids and "\n" in str(document.id):  # readers pass on a number of the file
                    raise SelectionError(f"{path}: the id {document.id!r} has a line break; write ids without one")
            features = np.asarray(self.embed([document.text for document in batch]), dtype=self.dtype)
            if features.ndim != 2 or len(features) != len(batch):
                raise SelectionError(f"embed gave {features.shape} for {len(batch)} texts; it must give a row for each")
            rows.append(features)
            ids += [document.id for document in batch]
            yield from batch
        if not rows:
            return
        if self.ids:
            with atomic_file(self.directory / f"part-{rank:05d}.ids") as handle:
                handle.write("".join(f"{name}\n" for name in ids).encode())
        with atomic_file(self.directory / f"part-{rank:05d}.npy") as handle:
            np.save(handle, np.concatenate(rows), allow_pickle=False)
