"""What cannot be stacked, and why, in a sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..config import Adapter, Train
from ..errors import UserError

if TYPE_CHECKING:
    from regularizers.config import RegularizerConfig

    from ..tasks import Task

_OWN_PASS = {
    "sam": "it differentiates with respect to the dense weights",
    "bi-lora": "it trains a second adapter",
    "neftune": "it draws its noise in the embedding's own forward pass",
}


class NotStackable(UserError):
    """These cells cannot share a forward pass; each of them can run alone."""


def refusal(task: Task, adapter: Adapter, train: Train, regularizer: RegularizerConfig) -> str | None:
    """Why a cell with these settings runs alone; None where it may share the backbone with others."""
    if "stack" in task.refuses:
        return task.refuses["stack"]
    if adapter.dora:
        return "adapter.dora: the norms of DoRA need each cell's whole weights"
    if adapter.init != "default":
        return f"adapter.init: {adapter.init} is worked out for each cell, and may change the frozen weights"
    for name in ("under", "start", "bias", "train_whole", "experts", "soft_tokens"):
        if getattr(adapter, name) is not None:
            return f"adapter.{name}: stacked cells share frozen weights and train fresh factors of linear layers only"
    for name in ("ranks", "alphas", "layers", "exclude"):
        if getattr(adapter, name) is not None:
            return f"adapter.{name}: stacked cells adapt the same layers, each cell at one rank"
    if adapter.dropout > 0:
        return "adapter.dropout: the masks are drawn by each cell in a forward pass of its own"
    if train.backbone_dropout:
        return "train.backbone_dropout: the masks are drawn by each cell in a forward pass of its own"
    if train.quantization is not None:
        return "train.quantization: the products with quantised weights are the library's own"
    if train.precision == "fp16":
        return "train.precision: fp16 scales each cell's loss by itself"
    if train.backbone_precision == "bf16":
        return "train.backbone_precision: bf16 widens weights in each cell's own forward pass"
    if train.adapter_precision == "bf16":
        return "train.adapter_precision: stacked adapters are kept in float32"
    if train.checkpointing != "none":
        return "train.checkpointing: blocks that are computed again would be computed for all cells"
    if train.compile:
        return "train.compile: a stack computes the adapted layers of all cells with kernels of its own"
    if train.spikes is not None:
        return "train.spikes: cells of a stack keep no checkpoints to go back to"
    if regularizer.kind in _OWN_PASS:
        return f"regularizer.kind: {regularizer.kind} changes the forward pass, {_OWN_PASS[regularizer.kind]}"
    if getattr(regularizer, "scope", "step") == "sample":
        return "regularizer.scope: sample draws for the rows of one cell's batch"
    return None
