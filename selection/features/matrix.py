"""Feature matrices on disk that look like arrays to a selector: sharded, a subset of rows, or your own `.npy`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flatshift.selection.errors import SelectionError
from flatshift.selection.lazy import np


@dataclass(frozen=True, kw_only=True)
class PrecomputedFeatures:
    """Your own features, one row per record in file order, used as given (never normalised)."""

    kind: Literal["features"] = "features"
    pool: str = ""
    """`.npy` file, N×d, or a directory of feature shards with its `manifest.json` (docs/feature-shards.md). This and
    the others may also be an address, s3://bucket/features, which is copied into `select.cache`."""
    target: str = ""
    """`.npy` file, M×d."""
    negative: str = ""
    """`.npy` file, one row per negative example (gotd-contrast)."""


class _LazyRows:
    """Read-only rows (N, d): `rows[low:high]`, `rows[numbers]`, `rows[mask]` copy those rows; `rows[i]` one of them."""

    shape: tuple[int, int]
    dtype: np.dtype[Any]
    ndim = 2

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        return self.shape[0] * self.shape[1] * self.dtype.itemsize

    def __getitem__(self, key: Any) -> np.ndarray:
        if isinstance(key, slice):
            low, high, step = key.indices(len(self))
            return self._span(low, max(low, high)) if step == 1 else self._gather(np.arange(low, high, step))
        if isinstance(key, int | np.integer):
            if not -len(self) <= key < len(self):
                raise IndexError(f"row {key} of {len(self)}")
            return self._span(int(key) % len(self), int(key) % len(self) + 1)[0]
        rows = np.asarray(key)
        if rows.dtype == bool:
            if rows.shape != (len(self),):
                raise IndexError(f"a mask of shape {rows.shape} for {len(self)} rows")
            rows = np.flatnonzero(rows)
        if rows.size and not (-len(self) <= rows.min() and rows.max() < len(self)):
            raise IndexError(f"rows beyond {len(self)}")
        return self._gather(np.where(rows < 0, rows + len(self), rows).astype(np.int64))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("rows on disk cannot become an array without a copy")
        return self._span(0, len(self)).astype(dtype or self.dtype, copy=False)

    def _span(self, low: int, high: int) -> np.ndarray:
        return self._gather(np.arange(low, high))

    def _gather(self, rows: np.ndarray) -> np.ndarray:
        raise NotImplementedError


class ShardedRows(_LazyRows):
    """Rows of several concatenated `.npy` files, each memory-mapped when it is read."""

    def __init__(self, files: Sequence[Path], lengths: Sequence[int], dim: int, dtype: Any):
        self.files = tuple(files)
        self._starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        self.shape = (int(self._starts[-1]), dim)
        self.dtype = np.dtype(dtype)

    def _span(self, low: int, high: int) -> np.ndarray:
        out = np.empty((high - low, self.shape[1]), dtype=self.dtype)
        shard = int(np.searchsorted(self._starts, low, side="right")) - 1
        done = low
        while done < high:
            end = min(high, int(self._starts[shard + 1]))
            out[done - low : end - low] = self._mapped(shard)[done - self._starts[shard] : end - self._starts[shard]]
            done, shard = end, shard + 1
        return out

    def _gather(self, rows: np.ndarray) -> np.ndarray:
        out = np.empty((len(rows), self.shape[1]), dtype=self.dtype)
        shard_of = np.searchsorted(self._starts, rows, side="right") - 1
        for shard in np.unique(shard_of).tolist():
            positions = np.flatnonzero(shard_of == shard)
            out[positions] = self._mapped(shard)[rows[positions] - self._starts[shard]]
        return out

    def _mapped(self, shard: int) -> np.ndarray:
        return np.load(self.files[shard], mmap_mode="r", allow_pickle=False)


class IndexedRows(_LazyRows):
    """Rows `index` of another matrix, an array (N,) or a range, read on demand."""

    def __init__(self, source: Any, index: np.ndarray | range):
        self.source, self.index = source, index
        self.shape = (len(index), source.shape[1])
        self.dtype = source.dtype

    def _span(self, low: int, high: int) -> np.ndarray:
        rows = self.index[low:high]
        return np.asarray(self.source[slice(rows.start, rows.stop) if isinstance(rows, range) else rows])

    def _gather(self, rows: np.ndarray) -> np.ndarray:
        index = rows + self.index.start if isinstance(self.index, range) else self.index[rows]
        return np.asarray(self.source[index])


def sendable_rows(x: Any, low: int, high: int) -> Any:
    """Return rows [low, high) of `x` in a form to send to another process: rows on disk as the names of their files."""
    if isinstance(x, IndexedRows):
        return IndexedRows(sendable_rows(x.source, 0, len(x.source)), x.index[low:high])
    if isinstance(x, np.memmap):
        x = ShardedRows([Path(str(x.filename)).resolve()], [len(x)], x.shape[1], x.dtype)
    return IndexedRows(x, range(low, high)) if isinstance(x, _LazyRows) else np.asarray(x[low:high])


def load_features(path: str | Path, *, rows: int | None = None, flag: str = "features") -> np.ndarray:
    """Open a `.npy` matrix as a read-only memory map; nothing in it is executed.

    rows: required number of rows, one per record. flag: the user's name for the file, for messages.
    Raises SelectionError for a missing or foreign file, a wrong shape or dtype, or another number of rows.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise SelectionError(f"{flag}: {path} is no file; save one array with numpy.save")
    if path.is_file():
        with path.open("rb") as handle:
            if handle.read(4) not in (b"\x93NUM", b"PK\x03\x04"):  # an archive of arrays is reported below
                raise SelectionError(f"{flag}: {path} is no .npy file; save one array with numpy.save")
    try:
        features = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise SelectionError(f"{flag}: {path} does not exist") from None
    except MemoryError:
        raise SelectionError(f"{flag}: {path} claims more numbers than memory holds; save it again") from None
    except Exception as error:  # the header is Python text, and a damaged one raises errors of any kind
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        reason = "its header is damaged" if reason.startswith(("Cannot parse header", "malformed")) else reason[:120]
        raise SelectionError(f"{flag}: {path} is not a readable .npy file of numbers ({reason})") from error
    if not isinstance(features, np.ndarray):
        raise SelectionError(f"{flag}: {path} is an archive; save one array with numpy.save")
    if features.ndim != 2 or features.dtype.kind not in "fiu" or 0 in features.shape:
        raise SelectionError(
            f"{flag}: {path} must hold a matrix of numbers (rows, columns), "
            f"not shape {features.shape} of {features.dtype}"
        )
    if rows is not None and len(features) != rows:
        raise SelectionError(
            f"{flag}: {path} has {len(features)} rows for {rows} records; one row per record is needed"
        )
    return features
