"""Random projections of long gradients to a few thousand numbers, on the CPU, without a matrix in memory.

Both kinds preserve inner products in expectation, with a variance of about (|x|²|y|² + ⟨x, y⟩²)/dim (Johnson and
Lindenstrauss; Achlioptas 2003 for signs, Ailon and Chazelle 2009 for the transform). Replaces trak's CUDA `fast_jl`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flatshift.selection.errors import SelectionError
from flatshift.selection.validation import is_whole

_BLOCK = 1024
"""Input columns whose signs exist at once. Part of the definition: it determines which generator draws which sign."""


class RandomProjection:
    """Linear map x (n, width) → (n, dim) float32, determined by (dim, seed, kind): pool and target need the same three.

    kind "rademacher": independent signs ±1/√dim, drawn block by block from a counter generator keyed by (seed, block);
    2·n·width·dim operations. "srht": signs, Walsh-Hadamard transform, `dim` of its outputs (drawn by seed); n·width·log
    width operations, and the better choice above a few hundred dimensions. Depends on the width as well.
    """

    def __init__(self, dim: int, *, seed: int = 0, kind: str = "rademacher"):
        if not is_whole(dim) or dim < 1:
            raise SelectionError(f"dim must be a whole number of at least 1, not {dim!r}")
        if not is_whole(seed) or not 0 <= seed < 1 << 64:
            raise SelectionError(f"seed must be a whole number from 0 to 2^64 − 1, not {seed!r}")
        if kind not in ("rademacher", "srht"):
            raise SelectionError(f'kind must be "rademacher" or "srht", not {kind!r}')
        self.dim = dim
        self.seed = seed
        self.kind = kind

    def project(self, x: Any, *, chunk: int | None = None) -> np.ndarray:
        """Return (n, dim) float32 for a matrix or memory map (n, width); chunk: rows at once, without effect on the
        result.

        Raises SelectionError for another shape or numbers that are not finite.
        """
        x = x if hasattr(x, "shape") else np.asarray(x)
        if len(x.shape) != 2 or 0 in x.shape:
            raise SelectionError(f"gradients must be a matrix (rows, columns) that is not empty, not {tuple(x.shape)}")
        return self._multiply_signs(x, chunk) if self.kind == "rademacher" else self._transform(x, chunk)

    def _multiply_signs(self, x: Any, chunk: int | None) -> np.ndarray:
        """Project block of columns by block of columns, so that each sign is drawn once for any number of rows."""
        out = np.zeros((x.shape[0], self.dim), dtype=np.float32)
        step = chunk or 8192
        for block, start in enumerate(range(0, x.shape[1], _BLOCK)):
            columns = slice(start, start + _BLOCK)
            width = min(_BLOCK, x.shape[1] - start)
            generator = np.random.Generator(np.random.Philox(key=[self.seed, 0x5167 + (block << 16)]))
            signs = _draw_signs(generator, width * self.dim).reshape(width, self.dim)
            for low in range(0, x.shape[0], step):
                out[low : low + step] += _check_finite(x[low : low + step, columns], low) @ signs
        out /= np.sqrt(np.float32(self.dim))
        return out

    def _transform(self, x: Any, chunk: int | None) -> np.ndarray:
        rows, width = x.shape
        size = 1 << (width - 1).bit_length()
        if self.dim > size:
            raise SelectionError(f"srht cannot make {self.dim} dimensions of {width}; ask for at most {size}")
        generator = np.random.Generator(np.random.Philox(key=[self.seed, 0x5247]))
        signs = _draw_signs(generator, width)
        columns = np.sort(generator.choice(size, self.dim, replace=False))
        out = np.empty((rows, self.dim), dtype=np.float32)
        step = chunk or max(1, (64 << 20) // (4 * size))
        for low in range(0, rows, step):
            gradients = _check_finite(x[low : low + step], low)
            padded = np.zeros((len(gradients), size), dtype=np.float32)
            np.multiply(gradients, signs, out=padded[:, :width])
            _hadamard(padded)
            out[low : low + step] = padded[:, columns]
        out /= np.sqrt(np.float32(self.dim))
        return out


def _draw_signs(generator: np.random.Generator, count: int) -> np.ndarray:
    """Draw (count,) float32 of ±1, a bit each."""
    bits = np.unpackbits(np.frombuffer(generator.bytes(-(-count // 8)), dtype=np.uint8))
    signs = bits[:count].astype(np.float32)
    signs *= 2.0
    signs -= 1.0
    return signs


def _hadamard(rows: np.ndarray) -> None:
    """Apply the unscaled Walsh-Hadamard transform to each row, in place; the width is a power of two."""
    half = 1
    while half < rows.shape[1]:
        pairs = rows.reshape(len(rows), -1, 2, half)
        lower = pairs[:, :, 0] - pairs[:, :, 1]
        pairs[:, :, 0] += pairs[:, :, 1]
        pairs[:, :, 1] = lower
        half *= 2


def _check_finite(gradients: Any, low: int) -> np.ndarray:
    rows = np.asarray(gradients, dtype=np.float32)
    if not np.isfinite(rows.sum()) and not np.isfinite(rows).all():
        bad = low + int(np.flatnonzero(~np.isfinite(rows).all(axis=1))[0])
        raise SelectionError(f"gradients: row {bad} holds a NaN or an infinity; drop or mend it")
    return rows
