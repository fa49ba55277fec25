"""The engine of one cell: a PEFT model of its own whose frozen tensors are those of a backbone that many cells use."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from ..adapters.adapter import attach_adapter
from ..config import Adapter, Train
from ..parallel.engine import Engine
from ..parallel.mesh import World

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..tasks import Task


class CellEngine(Engine):
    """An engine that leaves neither checkpoints nor an adapter: a cell that is stopped begins anew."""

    keeps = False

    def save_adapter(self, directory: Path) -> None:
        """The trained tensors stay in memory, where the cell is judged."""


def cell_engine(backbone: PreTrainedModel, adapter: Adapter, *, task: Task, train: Train) -> CellEngine:
    """A cell on `backbone` with the adapter that `finetune.parallel.build.build_engine` would draw for it alone."""
    model = attach_adapter(shared_copy(backbone), adapter, task=task, seed=train.seed)
    return CellEngine(model, World.alone(backbone.device))


def shared_copy(backbone: PreTrainedModel) -> PreTrainedModel:
    """Another tree of modules over the very same tensors; only what the checkpoint lacked (a new head) is its own."""
    new = set(getattr(backbone, "new_parameters", ()))
    shared: dict[int, Tensor] = {id(p): p for name, p in backbone.named_parameters() if name not in new}
    shared |= {id(buffer): buffer for buffer in backbone.buffers()}
    return copy.deepcopy(backbone, dict(shared))
