"""A backbone without its weights: every parameter on meta, every buffer real, matched with its checkpoint.

It is what `load_backbone` gives, down to names, dtypes, ties, config and errors, but nothing is read except config.json
and the headers of the weight files.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..compute.matmul_rate import DTYPES
from ..config import Precision
from ..errors import UserError
from .backbone import auto_class, check_dropout, configured, finish, quiet_transformers, refusal, resolve_backbone
from .weight_names import Checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..tasks import Task


def build_skeleton(
    name: str | Path,
    *,
    task: Task,
    num_labels: int | None = None,
    label_names: Sequence[str] | None = None,
    precision: Precision = "fp32",
    dropout: float | None = None,
) -> PreTrainedModel:
    """The frozen backbone for `task` with parameters on meta; arguments as `load_backbone`.

    `model.new_parameters` are the names that the checkpoint lacks (a new head), `model.checkpoint` says where every
    other tensor is read from (`finetune.parallel.weights.load_weights`). The global random state is not touched.

    Raises:
        UserError: as `load_backbone`; or a weight file is missing or cut short; or the backbone is quantised.
    """
    directory = resolve_backbone(name)
    auto, options = auto_class(task, num_labels=num_labels, label_names=label_names)
    where = f"backbone {str(name)!r}"
    dtype = DTYPES[precision]
    try:
        model: Any = empty_model(auto, directory, dtype=dtype, dropout=dropout, **options)
    except UserError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise refusal(error, task, where) from error
    if getattr(model.config, "quantization_config", None) is not None:
        raise UserError(
            f"{where} is quantised already, and neither a mesh nor train.quantization begins with that; take the "
            "unquantised one, or one device and no train.quantization"
        )
    check_dropout(model, dropout, where)
    checkpoint = Checkpoint.of(model, directory)
    if checkpoint.mismatched and not options:
        odd = checkpoint.mismatched[0]
        raise UserError(f"{where}: {odd} has another shape in its weights than config.json says; fetch it again")
    finish(
        model,
        {"missing_keys": checkpoint.missing, "mismatched_keys": checkpoint.mismatched},
        name=name,
        task=task,
    )
    model.checkpoint = checkpoint
    return model


def empty_model(
    auto: Any, directory: Path, *, dtype: torch.dtype, dropout: float | None = None, **options: Any
) -> PreTrainedModel:
    """The model of transformers' class `auto` for `directory` in evaluation mode, parameters on meta, weights tied.

    Args:
        dropout: as in `load_backbone`.
        options: settings of the config that differ from config.json.
    """
    from accelerate import init_empty_weights
    from transformers import GenerationConfig

    with quiet_transformers(), torch.random.fork_rng(devices=[]):
        config = configured(directory, options, dropout=dropout)
        with init_empty_weights(include_buffers=False):
            model: Any = auto.from_config(copy.deepcopy(config), dtype=dtype, trust_remote_code=False)
        model.tie_weights()
        if model.can_generate() and (directory / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(directory)
    _keep_precision(model, dtype)
    return model.eval()


def _keep_precision(model: Any, dtype: torch.dtype) -> None:
    """Give the parameters for which transformers demands float32 in any precision that type."""
    patterns = [re.compile(glob.replace("*", ".*")) for glob in model._get_dtype_plan(dtype)]
    for name, parameter in list(model.named_parameters()):
        if any(pattern.search(name) for pattern in patterns):
            owner, _, leaf = name.rpartition(".")
            wide = nn.Parameter(torch.empty_like(parameter, dtype=torch.float32), requires_grad=parameter.requires_grad)
            setattr(model.get_submodule(owner), leaf, wide)
