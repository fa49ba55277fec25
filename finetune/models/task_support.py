"""Whether a backbone is made for a task, told from its config.json: before weights are read or anything is trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError, first_line, is_out_of_memory
from .backbone import Backbone, open_backbone, reads_both_ways

if TYPE_CHECKING:
    from ..tasks import Task


def check_task(name: str | Path | Backbone, task: Task) -> None:
    """Refuse a task that `finetune.models.load.load_backbone` would refuse for the backbone's kind, in its words.

    What only the weights can tell (they are damaged, or lack a head) is left to loading.

    Raises:
        UserError: transformers has no class of this task for it, or it is an encoder where a decoder is needed or the
            other way round; and as `open_backbone`.
    """
    backbone = open_backbone(name)
    config, where = backbone.config, backbone.where
    auto, _ = auto_class(task, num_labels=2, label_names=None)
    if type(config) not in auto._model_mapping:  # what `from_pretrained` asks first
        raise no_class(task, where)
    if task.backbone == "encoder" or not config.is_encoder_decoder:  # else the decoder alone is meant, if it is there
        check_causal(config, task, where)


def auto_class(
    task: Task, *, num_labels: int | None, label_names: Sequence[str] | None
) -> tuple[type[Any], dict[str, Any]]:
    """transformers' class for `task` and the settings of its config: the classes of a head."""
    import transformers

    return getattr(transformers, task.auto_class), task.head_settings(num_labels=num_labels, label_names=label_names)


def check_causal(config: Any, task: Task, where: str) -> None:
    """Raise UserError for an encoder as language model, and a decoder as masked one; `config` is transformers' own."""
    if task.backbone == "decoder" and reads_both_ways(config):
        raise UserError(
            f"{where} is an encoder ({config.model_type}) whose tokens see the future, so it cannot be trained as a "
            "language model; take `task.kind: masked-lm` or classify, or a decoder"
        )
    if task.backbone == "encoder" and (config.is_encoder_decoder or getattr(config, "is_decoder", False)):
        raise UserError(f"{where} has a decoder ({config.model_type}), and task.kind: masked-lm is for encoders")


def no_class(task: Task, where: str) -> UserError:
    """What the user is told where transformers has no class of this task for the backbone."""
    return UserError(
        f"{where}: transformers has no {task.modelling} class for this architecture; `task.kind: seq2seq` is for "
        "encoder-decoders (T5, BART), language-model and completion are for decoders, masked-lm is for encoders, "
        "classify and regress are for most"
    )


def refusal(error: Exception, task: Task, where: str) -> UserError:
    """What the user is told where transformers cannot build or load a model for `task`; raises `error` itself where
    memory ran out."""
    if is_out_of_memory(error):
        raise error
    if "Unrecognized configuration class" in str(error):
        return no_class(task, where)
    return UserError(f"{where} cannot be loaded for {task.modelling}: {first_line(error)}")
