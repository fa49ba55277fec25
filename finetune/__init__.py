"""Frozen backbones, adapters on top of them, the training loop, checkpoints and evaluation.

    model = attach_adapter(load_backbone("flatshift-5m", task=LanguageModel()), Adapter(), task=LanguageModel(), seed=0)
    stage = TrainingStage(name="fine-tune", ..., run=RunDirectory.create("runs/first"))
    result = Trainer(model, tokenizer, stage).fit()

Names are resolved on first use, so importing `flatshift.finetune.config` imports nothing else.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .adapters.adapter import attach_adapter, load_adapter, save_adapter, trainable
    from .config import Adapter, Evaluate, Mesh, Optimizer, Train
    from .data.config import Data
    from .errors import Interrupted, UserError
    from .models.backbone import Backbone, open_backbone
    from .models.fingerprint import checksum
    from .models.load import load_backbone
    from .planner.memory import memory_plan, plan_lines
    from .run_directory import RunDirectory, read_metrics
    from .tasks import Chat, Classify, Completion, LanguageModel, MaskedLM, Preference, Regress, Seq2Seq, Task
    from .train.divergence import Diverged
    from .train.stage import StageResult, TrainingStage
    from .train.trainer import Trainer

_HOMES = {
    "adapters.adapter": ("attach_adapter", "load_adapter", "save_adapter", "trainable"),
    "models.backbone": ("Backbone", "open_backbone"),
    "config": ("Adapter", "Evaluate", "Mesh", "Optimizer", "Train"),
    "data.config": ("Data",),
    "errors": ("Interrupted", "UserError"),
    "models.fingerprint": ("checksum",),
    "models.load": ("load_backbone",),
    "tasks": (
        "Chat",
        "Classify",
        "Completion",
        "LanguageModel",
        "MaskedLM",
        "Preference",
        "Regress",
        "Seq2Seq",
        "Task",
    ),
    "train.divergence": ("Diverged",),
    "train.stage": ("StageResult", "TrainingStage"),
    "train.trainer": ("Trainer",),
    "planner.memory": ("memory_plan", "plan_lines"),
    "run_directory": ("RunDirectory", "read_metrics"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Adapter",
    "Backbone",
    "Chat",
    "Classify",
    "Completion",
    "Data",
    "Diverged",
    "Evaluate",
    "Interrupted",
    "LanguageModel",
    "MaskedLM",
    "Mesh",
    "Optimizer",
    "Preference",
    "Regress",
    "RunDirectory",
    "Seq2Seq",
    "StageResult",
    "Task",
    "Train",
    "Trainer",
    "TrainingStage",
    "UserError",
    "attach_adapter",
    "checksum",
    "load_adapter",
    "load_backbone",
    "memory_plan",
    "open_backbone",
    "plan_lines",
    "read_metrics",
    "save_adapter",
    "trainable",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
