"""Intermediate results of an unfinished selection: slow scores, and a model's losses batch by batch."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flatshift.experiments.select.outputs import to_json_values
from flatshift.experiments.select.pool import PoolAndTarget
from flatshift.selection.features import FeatureCache
from flatshift.selection.features.cache import atomic_file
from flatshift.selection.methods.base import Selector

_FILE = "scores.npz"
_ROWS_HASHED = 1 << 14  # at a time: features of the user may be a memory map larger than memory


class ScoreCheckpoint:
    """Scores of a fitted selector in `directory`, tied to the exact texts they belong to.

    Selectors with transport potentials are not stored here: their solver keeps its own passes
    (`flatshift.selection.transport`).
    """

    def __init__(self, directory: Path, sides: PoolAndTarget):
        self.path = directory / _FILE
        self._sides = sides
        self.restored = False

    def save(self, selector: Selector) -> None:
        """Write the file that `restore` reads."""
        if any(hasattr(part, "potentials_") for part in (selector, getattr(selector, "inside", None))):
            return
        arrays: dict[str, Any] = {
            "scores": selector.scores_,
            "told": np.array(json.dumps(to_json_values(selector.diagnostics_))),
        }
        for name, part in (("nearest", selector.nearest_target_), ("readings", selector.readings_)):
            if part is not None:
                arrays[name] = part
        with atomic_file(self.path) as handle:
            np.savez(handle, digest=np.array(self._digest()), **arrays)

    def restore(self, selector: Selector) -> bool:
        """Return True if `selector` now has the scores of an earlier attempt; False if there are none for these
        texts."""
        try:
            with np.load(self.path, allow_pickle=False) as stored:
                if str(stored["digest"]) != self._digest():
                    return False
                selector.scores_ = stored["scores"]
                selector.nearest_target_ = stored["nearest"] if "nearest" in stored.files else None
                selector.readings_ = stored["readings"] if "readings" in stored.files else None
                selector.diagnostics_ = json.loads(str(stored["told"]))
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return False
        self.restored = True
        return True

    def _digest(self) -> str:
        digest = hashlib.sha256()
        targets = (row.values["text"] for row in self._sides.target.rows)
        for texts in (self._sides.pool.rows.texts, targets):
            for text in texts:
                raw = text.encode("utf-8", "surrogatepass")
                digest.update(len(raw).to_bytes(8, "little") + raw)
        for side in (self._sides.x, self._sides.y):  # the user's own features do not depend on the texts
            if side is None:
                continue
            for start in range(0, len(side), _ROWS_HASHED):
                digest.update(np.ascontiguousarray(side[start : start + _ROWS_HASHED]).tobytes())
        return digest.hexdigest()


def with_cached_losses(
    measure: Callable[[Sequence[str]], np.ndarray], directory: Path, key: str
) -> Callable[[Sequence[str]], np.ndarray]:
    """Return `measure` with the losses of each batch of texts kept in `directory`."""

    def losses(texts: Sequence[str]) -> np.ndarray:
        found = FeatureCache(directory).features(
            texts, lambda some: _split_nan(measure(some)), key=key, shard_rows=len(texts)
        )
        values = np.asarray(found, dtype=np.float64)
        return np.where(values[:, 1] > 0, np.nan, values[:, 0])

    return losses


def _split_nan(losses: np.ndarray) -> np.ndarray:
    """Return (n, 2): the losses with 0 in place of NaN, and a flag for each NaN."""
    none = np.isnan(losses)
    return np.stack([np.where(none, 0.0, losses), none], axis=1)
