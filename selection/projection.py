"""Random projections of long gradients to a few thousand numbers, on the CPU, without a matrix in memory.

Both keep inner products in expectation, with a variance of about (|x|²|y|² + ⟨x, y⟩²)/dim (Johnson and Lindenstrauss;
Achlioptas 2003 for signs, Ailon and Chazelle 2009 for the transform). What trak's CUDA `fast_jl` is used for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from selection.errors import SelectionError

_BLOCK = 4096
"""Input columns whose signs exist at once. Part of the definition: it decides which generator draws which sign."""


class RandomProjection:
    """x (n, width) → (n, dim) float32, linear and fixed by (dim, seed, kind): pool and target need the same three.

    kind "rademacher": independent signs ±1/√dim, drawn block by block from a counter generator keyed by (seed, block);
    2·n·width·dim operations. "srht": signs, Walsh-Hadamard transform, `dim` of its outputs (drawn by seed);
    n·width·log width operations, and the better choice above a few hundred dimensions. Depends on the width as well.
    """

    def __init__(self, dim: int, *, seed: int = 0, kind: str = "rademacher"):
        if isinstance(dim, bool) or not isinstance(dim, int) or dim < 1:
            raise SelectionError(f"dim must be a whole number of at least 1, not {dim!r}")
        if kind not in ("rademacher", "srht"):
            raise SelectionError(f'kind must be "rademacher" or "srht", not {kind!r}')
        self.dim = dim
        self.seed = seed
        self.kind = kind

    def project(self, x: Any, *, chunk: int | None = None) -> np.ndarray:
        """(n, dim) float32 for a matrix or memory map (n, width); chunk: rows at once, the result does not depend on it.

        Raises SelectionError for another shape or numbers that are not finite.
        """
        x = x if hasattr(x, "shape") else np.asarray(x)
        if len(x.shape) != 2 or 0 in x.shape:
            raise SelectionError(f"gradients must be a matrix (rows, columns) that is not empty, not {tuple(x.shape)}")
        out = np.empty((x.shape[0], self.dim), dtype=np.float32)
        step = chunk or max(1, (64 << 20) // (4 * x.shape[1]))
        for low in range(0, x.shape[0], step):
            rows = np.asarray(x[low : low + step], dtype=np.float32)
            if not np.isfinite(rows).all():
                bad = low + int(np.flatnonzero(~np.isfinite(rows).all(axis=1))[0])
                raise SelectionError(f"gradients: row {bad} holds a NaN or an infinity; drop or mend it")
            out[low : low + step] = self._signs(rows) if self.kind == "rademacher" else self._transform(rows)
        return out

    def project_parts(self, parts: Iterable[Any]) -> np.ndarray:
        """One row (dim,) float32 from its pieces in order, such as a model's gradients tensor by tensor.

        Equal to `project` of the concatenated row. Only "rademacher" can; raises SelectionError for the other.
        """
        if self.kind != "rademacher":
            raise SelectionError("srht needs whole rows; use project, or kind rademacher")
        total = np.zeros(self.dim)
        waiting: list[np.ndarray] = []
        held = block = 0
        for part in parts:
            flat = np.asarray(part, dtype=np.float32).ravel()
            while len(flat):
                piece, flat = flat[: _BLOCK - held], flat[_BLOCK - held :]
                waiting.append(piece)
                held += len(piece)
                if held == _BLOCK:
                    total += np.concatenate(waiting) @ self._block(block, held)
                    waiting, held, block = [], 0, block + 1
        if held:
            total += np.concatenate(waiting) @ self._block(block, held)
        return (total / np.sqrt(self.dim)).astype(np.float32)

    def _signs(self, rows: np.ndarray) -> np.ndarray:
        total = np.zeros((len(rows), self.dim))
        for block, low in enumerate(range(0, rows.shape[1], _BLOCK)):
            part = rows[:, low : low + _BLOCK]
            total += part @ self._block(block, part.shape[1])
        return total / np.sqrt(self.dim)

    def _block(self, block: int, width: int) -> np.ndarray:
        """Signs (width, dim) float32 of the columns from block·4096 on."""
        generator = np.random.Generator(np.random.Philox(key=[self.seed & (2**64 - 1), 0x5167 + (block << 16)]))
        bits = np.unpackbits(np.frombuffer(generator.bytes(-(-width * self.dim // 8)), dtype=np.uint8))
        signs = bits[: width * self.dim].reshape(width, self.dim).astype(np.float32)
        signs *= 2.0
        signs -= 1.0
        return signs

    def _transform(self, rows: np.ndarray) -> np.ndarray:
        width = rows.shape[1]
        size = max(1 << (width - 1).bit_length(), 1)
        if self.dim > size:
            raise SelectionError(f"srht cannot make {self.dim} dimensions of {width}; ask for at most {size}")
        generator = np.random.Generator(np.random.Philox(key=[self.seed & (2**64 - 1), 0x5247]))
        bits = np.unpackbits(np.frombuffer(generator.bytes(-(-width // 8)), dtype=np.uint8))[:width]
        taken = np.sort(generator.choice(size, self.dim, replace=False))
        padded = np.zeros((len(rows), size), dtype=np.float32)
        np.multiply(rows, 2.0 * bits.astype(np.float32) - 1.0, out=padded[:, :width])
        half = 1
        while half < size:
            pairs = padded.reshape(len(rows), -1, 2, half)
            upper = pairs[:, :, 0] - pairs[:, :, 1]
            pairs[:, :, 0] += pairs[:, :, 1]
            pairs[:, :, 1] = upper
            half *= 2
        return padded[:, taken] / np.sqrt(self.dim)
