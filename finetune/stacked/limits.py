"""What may be stacked: what cannot, a sentence each in one table, and what a stack will hold in memory.

One backbone, four tensors of each cell's adapter (value, gradient, two moments), and what one pass keeps for its
backward pass: not the whole step's, because a step's passes come one after another. Not in it: the allocator's slack,
the libraries, and short-lived temporaries except the slice of logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..config import Adapter, Mesh, Train
from ..errors import UserError
from ..planner.rules import RuleSettings
from .passes import SHARED_TOKENS

if TYPE_CHECKING:
    from pathlib import Path

    from flatshift.regularizers.config import RegularizerConfig

    from ..tasks import Task


class NotStackable(UserError):
    """These cells cannot share a forward pass; each of them can run alone."""


@dataclass(frozen=True)
class Reason:
    """Why a cell runs alone."""

    says: str
    """The setting, and why; `{it}` is what `holds` found."""
    holds: Callable[[RuleSettings], Any]


def _adapter_has(name: str, why: str) -> Reason:
    return Reason(f"adapter.{name}: {why}", lambda s: getattr(s.adapter, name) is not None)


_OWN_LAYERS = "stacked cells share frozen weights and train fresh factors of linear layers only"
_OWN_RANKS = "stacked cells adapt the same layers, each cell at one rank"
_OWN_MASKS = "the masks are drawn by each cell in a forward pass of its own"

REASONS: tuple[Reason, ...] = (
    Reason("{it}", lambda s: s.task.refuses.get("stack")),
    Reason("adapter.dora: the norms of DoRA need each cell's whole weights", lambda s: s.adapter.dora),
    Reason(
        "adapter.init: {it} is worked out for each cell, and may change the frozen weights",
        lambda s: s.adapter.init != "default" and s.adapter.init,
    ),
    *(
        _adapter_has(name, _OWN_LAYERS)
        for name in ("under", "start", "bias", "train_whole", "experts", "soft_tokens")
    ),
    *(_adapter_has(name, _OWN_RANKS) for name in ("ranks", "alphas", "layers", "exclude")),
    Reason(f"adapter.dropout: {_OWN_MASKS}", lambda s: s.adapter.dropout > 0),
    Reason(f"train.backbone_dropout: {_OWN_MASKS}", lambda s: s.train.backbone_dropout),
    Reason("task.loss: squared: stacked cells share one cross entropy", lambda s: getattr(s.task, "loss", None)),
    Reason(
        "adapter.targets: a head that LoRA adapts is each cell's own",
        lambda s: not isinstance(s.adapter.targets, str) and {"classifier", "score"} & set(s.adapter.targets),
    ),
    Reason(
        "train.quantization: the products with quantised weights are the library's own",
        lambda s: s.train.quantization is not None,
    ),
    Reason("train.precision: fp16 scales each cell's loss by itself", lambda s: s.train.precision == "fp16"),
    Reason(
        "train.backbone_precision: bf16 widens weights in each cell's own forward pass",
        lambda s: s.train.backbone_precision == "bf16",
    ),
    Reason(
        "train.adapter_precision: stacked adapters are kept in float32",
        lambda s: s.train.adapter_precision == "bf16",
    ),
    Reason(
        "train.checkpointing: blocks that are computed again would be computed for all cells",
        lambda s: s.train.checkpointing != "none",
    ),
    Reason(
        "train.compile: a stack computes the adapted layers of all cells with kernels of its own",
        lambda s: s.train.compile,
    ),
    Reason(
        "train.spikes: cells of a stack keep no checkpoints to go back to", lambda s: s.train.spikes is not None
    ),
    Reason(
        "regularizer.kind: sam changes the forward pass, it differentiates with respect to the dense weights",
        lambda s: s.regularizer.kind == "sam",
    ),
    Reason(
        "regularizer.kind: bi-lora changes the forward pass, it trains a second adapter",
        lambda s: s.regularizer.kind == "bi-lora",
    ),
    Reason(
        "regularizer.kind: neftune changes the forward pass, it draws its noise in the embedding's own forward pass",
        lambda s: s.regularizer.kind == "neftune",
    ),
    Reason(
        "regularizer.scope: sample draws for the rows of one cell's batch",
        lambda s: getattr(s.regularizer, "scope", "step") == "sample",
    ),
)  # fmt: skip


def refusal(task: Task, adapter: Adapter, train: Train, regularizer: RegularizerConfig) -> str | None:
    """Why a cell with these settings runs alone; None where it may share the backbone with others."""
    settings = RuleSettings(Mesh(), train, adapter, task, regularizer=regularizer)
    for reason in REASONS:
        if found := reason.holds(settings):
            return reason.says.format(it=found)
    return None


# --------------------------------------------------------------------------------------------------------------- memory


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
