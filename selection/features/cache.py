"""Cached features in shards on disk: computed once, verified on every read, resumed after a kill.

The file of a shard, the features of `shard_rows` consecutive texts, is named by a digest of everything it depends on:
the embedder (model and parameters), the stored dtype, and the texts, byte by byte; so nothing is ever out of date. It
is a plain `.npy` array followed by 32 bytes, the SHA-256 of all before; one that does not match is computed again.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Literal

import numpy as np

from flatshift.selection.errors import SelectionError, is_disk_full
from flatshift.selection.features.matrix import ShardedRows

SHARD_ROWS = 8192
_LEFTOVER_S = 86400
Embed = Callable[[list[str]], np.ndarray]
"""texts -> (len(texts), d) features."""
Progress = Callable[[int], None]
"""Called with the number of texts done."""
Stored = Literal["float32", "float16"]


def embed_in_shards(
    texts: Sequence[str],
    embed: Embed,
    *,
    dtype: Stored = "float32",
    shard_rows: int = SHARD_ROWS,
    progress: Progress | None = None,
) -> np.ndarray:
    """Compute features (len(texts), d) in memory, shard by shard: bit for bit the result of `FeatureCache.features`."""
    parts = []
    for low in range(0, len(texts), shard_rows):
        batch = list(texts[low : low + shard_rows])
        parts.append(_to_stored_dtype(embed(batch), len(batch), dtype, low))
        if progress:
            progress(low + len(batch))
    if not parts:
        raise SelectionError("there are no texts to embed")
    return np.concatenate(parts)


class FeatureCache:
    """Shards in one directory, which any number of pools, embedders and runs may share, also concurrently.

    `computed` and `reused` count the shards of the last call of `features`; `broken` counts those computed because
    their file did not match its digest.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self.computed = self.reused = self.broken = 0

    def features(
        self,
        texts: Sequence[str],
        embed: Embed,
        *,
        key: str,
        dtype: Stored = "float32",
        shard_rows: int = SHARD_ROWS,
        progress: Progress | None = None,
    ) -> ShardedRows:
        """Return the features of `texts`, computing the shards that have no intact file.

        key: identifies the embedder, its model's content and every parameter that changes its output. texts are read
        `shard_rows` at a time. Raises SelectionError for features that are not (len(texts), d), not finite, of
        differing width, or an unwritable directory; OSError if the disk is full, with the shards before it kept.
        """
        if not len(texts):
            raise SelectionError("there are no texts to embed")
        self._sweep()
        self.computed = self.reused = self.broken = 0
        files: list[Path] = []
        lengths: list[int] = []
        width: int | None = None
        for low in range(0, len(texts), shard_rows):
            batch = list(texts[low : low + shard_rows])
            digest = hashlib.sha256()
            for text in (key, dtype, *batch):
                # Each text is preceded by its length, so that different splits of the same bytes differ.
                raw = text.encode("utf-8", "surrogatepass")
                digest.update(len(raw).to_bytes(8, "little") + raw)
            path = self.directory / f"{digest.hexdigest()[:40]}.npy"
            dim = self._intact_width(path, len(batch))
            if dim is None:
                matrix = _to_stored_dtype(embed(batch), len(batch), dtype, low)
                self._write(path, matrix)
                dim = matrix.shape[1]
                self.computed += 1
            else:
                self.reused += 1
            if width not in (None, dim):
                raise SelectionError(f"the embedder gave {width} columns before text {low} and {dim} from there on")
            width = dim
            files.append(path)
            lengths.append(len(batch))
            if progress:
                progress(low + len(batch))
        assert width is not None
        return ShardedRows(files, lengths, width, dtype)

    def _intact_width(self, path: Path, rows: int) -> int | None:
        """Return the width of the shard at `path`, or None if it is missing or broken."""
        try:
            content = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise SelectionError(f"{path}: cannot be read ({error.strerror or error})") from error
        if hashlib.sha256(content[:-32]).digest() == content[-32:]:
            shape = np.load(io.BytesIO(content), allow_pickle=False).shape
            if shape[0] == rows:
                return int(shape[1])
        self.broken += 1
        return None

    def _write(self, path: Path, matrix: np.ndarray) -> None:
        buffer = io.BytesIO()
        np.save(buffer, matrix, allow_pickle=False)
        content = buffer.getbuffer()
        with atomic_file(path) as handle:
            handle.write(content)
            handle.write(hashlib.sha256(content).digest())

    def _sweep(self) -> None:
        """Remove temporary files of killed processes: those that no machine has written to for a day."""
        for leftover in self.directory.glob(".*.tmp"):
            with contextlib.suppress(OSError):
                if time.time() - leftover.stat().st_mtime > _LEFTOVER_S:
                    leftover.unlink()


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that becomes `path` on normal exit and is removed otherwise.

    Raises SelectionError if it cannot be written, OSError if the disk is full.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        temporary.replace(path)
    except OSError as error:
        if is_disk_full(error):
            raise
        raise SelectionError(f"{path.parent}: nothing can be written there ({error.strerror or error})") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _to_stored_dtype(features: np.ndarray, rows: int, dtype: Stored, offset: int) -> np.ndarray:
    """Convert `features` to the stored dtype; raise SelectionError if that is impossible."""
    if features.ndim != 2 or len(features) != rows or not features.shape[1]:
        raise SelectionError(f"the embedder must return ({rows}, d) for {rows} texts, not {features.shape}")
    with np.errstate(over="ignore"):
        stored = np.ascontiguousarray(features, dtype=dtype)
    if not np.isfinite(stored).all():
        row = offset + int(np.flatnonzero(~np.isfinite(stored).all(axis=1))[0])
        raise SelectionError(f"the features of text {row} are not finite in {dtype}; store float32, or mend the model")
    return stored
