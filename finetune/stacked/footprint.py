"""What a stack will hold in memory, estimated from config.json and the headers of the weight files.

One backbone, four tensors of each cell's adapter (value, gradient, two moments), and what one pass keeps for its
backward pass: not the whole step's, because a step's passes come one after another. Not in it: the allocator's slack,
the libraries, and short-lived temporaries except the slice of logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..config import Adapter, Mesh, Train
from .passes import SHARED_TOKENS

if TYPE_CHECKING:
    from pathlib import Path

_STATES = 4
"""Value, gradient, two moments."""


def estimate(directory: Path, cells: Sequence[tuple[Adapter, Train]], *, device: str = "cpu") -> int:
    """Bytes of a stack of these cells on the backbone in `directory`, of which only headers are read.

    Raises:
        UserError: config.json or the header of a weight file is missing or damaged.
    """
    from ..planner.footprint import Sizes, footprint

    sizes = {adapter.rank: Sizes.read(directory, adapter) for adapter, _ in cells}
    # of the pass that keeps most: as many rows as its tokens allow, at least one cell's micro-batch
    limit = SHARED_TOKENS.get(device, SHARED_TOKENS["cuda"])
    parts = []
    for adapter, train in cells:
        rows = max(train.batch_size, min(len(cells) * train.batch_size, limit // train.max_length))
        parts.append(footprint(sizes[adapter.rank], mesh=Mesh(), adapter=adapter, train=train, rows=rows))
    state = sum(4 * _STATES * sizes[adapter.rank].adapter for adapter, _ in cells)
    return max(part.weights + max(part.activations, part.logits) for part in parts) + state
