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
    from .adapters.adapter import attach_adapter as attach_adapter
    from .adapters.adapter import load_adapter as load_adapter
    from .adapters.adapter import save_adapter as save_adapter
    from .adapters.adapter import trainable as trainable
    from .config import Adapter as Adapter
    from .config import Evaluate as Evaluate
    from .config import Mesh as Mesh
    from .config import Optimizer as Optimizer
    from .config import Train as Train
    from .data.config import Data as Data
    from .errors import Interrupted as Interrupted
    from .errors import UserError as UserError
    from .models.backbone import Backbone as Backbone
    from .models.backbone import open_backbone as open_backbone
    from .models.fingerprint import checksum as checksum
    from .models.load import load_backbone as load_backbone
    from .planner.memory import memory_plan as memory_plan
    from .planner.memory import plan_lines as plan_lines
    from .run_directory import RunDirectory as RunDirectory
    from .run_directory import read_metrics as read_metrics
    from .tasks import Chat as Chat
    from .tasks import Classify as Classify
    from .tasks import Completion as Completion
    from .tasks import LanguageModel as LanguageModel
    from .tasks import MaskedLM as MaskedLM
    from .tasks import Preference as Preference
    from .tasks import Regress as Regress
    from .tasks import Seq2Seq as Seq2Seq
    from .tasks import Task as Task
    from .train.divergence import Diverged as Diverged
    from .train.stage import StageResult as StageResult
    from .train.stage import TrainingStage as TrainingStage
    from .train.trainer import Trainer as Trainer

_HOMES = {
    "adapters.adapter": ("attach_adapter", "load_adapter", "save_adapter", "trainable"),
    "models.backbone": ("Backbone", "open_backbone"),
    "config": ("Adapter", "Evaluate", "Mesh", "Optimizer", "Train"),
    "data.config": ("Data",),
    "errors": ("Interrupted", "UserError"),
    "models.fingerprint": ("checksum",),
    "models.load": ("load_backbone",),
    "tasks": (
        *("Chat", "Classify", "Completion", "LanguageModel", "MaskedLM", "Preference", "Regress", "Seq2Seq", "Task"),
    ),
    "train.divergence": ("Diverged",),
    "train.stage": ("StageResult", "TrainingStage"),
    "train.trainer": ("Trainer",),
    "planner.memory": ("memory_plan", "plan_lines"),
    "run_directory": ("RunDirectory", "read_metrics"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
