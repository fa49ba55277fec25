"""Whether a backbone is made for a task, told from its config.json: before weights are read or anything is trained."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .backbone import auto_class, check_causal, no_class, read_config

if TYPE_CHECKING:
    from ..tasks import Task


def check_task(name: str | Path, task: Task) -> None:
    """Refuse a task that `finetune.models.backbone.load_backbone` would refuse for the backbone's kind, in its words.

    What only the weights can tell (they are damaged, or lack a head) is left to loading.

    Raises:
        UserError: transformers has no class of this task for it, or it is an encoder where a decoder is needed or the
            other way round; and as `resolve_backbone`.
    """
    config = read_config(name)
    where = f"backbone {str(name)!r}"
    auto, _ = auto_class(task, num_labels=2, label_names=None)
    if type(config) not in auto._model_mapping:  # what `from_pretrained` asks first
        raise no_class(task, where)
    if task.backbone == "encoder" or not config.is_encoder_decoder:  # else the decoder alone is meant, if it is there
        check_causal(config, task, where)


def has_both_sides(name: str | Path) -> bool:
    """Whether the backbone is an encoder-decoder (T5, BART). Raises UserError as `resolve_backbone`."""
    return bool(read_config(name).is_encoder_decoder)
