"""Bytes that a regularizer holds on top of plain LoRA during a step, in closed form. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence

from flatshift.regularizers.config import (
    ASAM,
    GGPO,
    MGPO,
    MSAM,
    SAM,
    BiLora,
    FlatLora,
    LoraSAM,
    RegularizerConfig,
    default_rank,
)

_ROW, _COLUMN = 40, 16
"""Bytes per row of a GGPO layer: its owner and the key of its signs (int64), row norm, averaged gradient and its form,
two shares of power, and scale (float32); per column: the keys of its signs in noise and probe columns (int64)."""


def perturbation_bytes(
    config: RegularizerConfig,
    layers: Sequence[tuple[int, int]],
    *,
    adapter: int,
    held: int,
    tokens: float,
    stored: int,
    width: int,
) -> int:
    """Return the bytes for a whole model's layers; divide by the ranks that split it into stages or tensors.

    Args:
        layers: (rows, columns) of each adapted matrix.
        adapter: elements of LoRA's factors.
        held: ranks that the factors are sharded over; momentum is sharded likewise, noise is whole on every rank.
        tokens: tokens whose activations are kept for backward at once, in all of the layers.
        stored: bytes per frozen weight, whose dtype the noise has.
        width: bytes per activation.

    Momentum methods and SAM over factors hold the momentum, or the gradient of the first pass, and the unperturbed
    factors (float32); MGPO's form `code` the momentum and both sides of its rank-2r branch; Bi-LoRA a second adapter
    with its moments and the outputs of its A; SAM over weights their dense gradient; GGPO and Flat-LoRA both sides of
    the noise and of the probe columns, and the statistics of each row (`flatshift.regularizers.methods.noise_scales`).
    The others hold nothing.
    """
    rows, columns = (sum(each) for each in zip(*layers, strict=True)) if layers else (0, 0)
    if isinstance(config, MGPO) and config.form == "code":
        return 4 * adapter // held + 8 * adapter
    if isinstance(config, MGPO | MSAM | LoraSAM | ASAM):
        return 8 * adapter // held
    if isinstance(config, BiLora):
        return 12 * config.rank * (rows + columns) + int(width * tokens * config.rank * len(layers))
    if isinstance(config, SAM):
        return 4 * sum(m * n for m, n in layers)
    if isinstance(config, GGPO | FlatLora):
        probes = config.probes if isinstance(config, GGPO) and config.beta > 0 else 0
        noise = sum((config.rank or default_rank(m, n)) * (m + n) for m, n in layers)
        known = _ROW * rows + _COLUMN * columns
        if not probes:
            return stored * noise + known
        sketch = probes * (stored * columns + 4 * rows)
        return stored * noise + known + sketch + int(width * tokens * probes * len(layers))
    return 0
