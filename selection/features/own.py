"""Your own features: a `.npy` matrix, memory-mapped."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from selection.errors import SelectionError


def load_features(path: str | Path, *, rows: int | None = None, flag: str = "features") -> np.ndarray:
    """A `.npy` matrix as a read-only memory map; nothing in it is executed.

    rows: how many records it must have a row for. flag: what the caller's user knows the file by, for messages.
    Raises SelectionError for a missing or foreign file, a wrong shape or type, or a row count that does not match.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise SelectionError(f"{flag}: {path} is no file; save one array with numpy.save")
    if path.is_file() and not _is_npy(path):
        raise SelectionError(f"{flag}: {path} is no .npy file; save one array with numpy.save")
    try:
        features = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise SelectionError(f"{flag}: {path} does not exist") from None
    except MemoryError:
        raise SelectionError(f"{flag}: {path} claims more numbers than memory holds; save it again") from None
    except Exception as error:  # the header is Python text, and a damaged one fails in ways of every kind
        told = (str(error).splitlines() or [type(error).__name__])[0]
        told = "its header is damaged" if told.startswith(("Cannot parse header", "malformed")) else told[:120]
        raise SelectionError(f"{flag}: {path} is not a readable .npy file of numbers ({told})") from error
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


def _is_npy(path: Path) -> bool:
    with path.open("rb") as handle:
        return handle.read(4) in (b"\x93NUM", b"PK\x03\x04")  # an archive of arrays is told of below
