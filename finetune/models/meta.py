"""Build a backbone without its weights: parameters on the meta device, buffers real, matched with its checkpoint; and
the checks made on every backbone model, with weights or without.

Without weights the model equals the one from `load_backbone` in names, dtypes, ties, config and errors, but nothing is
read except config.json and the headers of the weight files.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..compute.matmul_rate import DTYPES
from ..compute.numerics import dropout_rates, uses_dropout
from ..config import Precision
from ..errors import UserError
from .backbone import (
    REFUSED,
    Backbone,
    BackboneTask,
    auto_class,
    check_causal,
    loading_error,
    open_backbone,
    quiet_transformers,
)
from .checkpoint import CheckpointFiles

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def build_skeleton(
    name: str | Path | Backbone,
    *,
    task: BackboneTask,
    num_labels: int | None = None,
    label_names: Sequence[str] | None = None,
    precision: Precision = "fp32",
    dropout: float | None = None,
) -> PreTrainedModel:
    """Build the frozen backbone for `task` with parameters on meta; arguments as for `load_backbone`.

    `model.new_parameters` lists the parameters that the checkpoint lacks (a new head); `model.checkpoint` maps every
    other tensor to its file (`flatshift.finetune.parallel.weights.load_weights`). The global random state is not
    touched.

    Raises UserError as `load_backbone`; or a weight file is missing or cut short; or it is quantised in
    a format that is not read (`flatshift.finetune.models.dequantize`).
    """
    backbone = open_backbone(name)
    model_class, options = auto_class(task, num_labels=num_labels, label_names=label_names)
    context = backbone.where
    dtype = DTYPES[precision]
    try:
        model: Any = empty_model(model_class, backbone, dtype=dtype, dropout=dropout, **options)
    except UserError:
        raise
    except REFUSED as error:
        raise loading_error(error, task, context) from error
    check_dropout(model, dropout, context)
    checkpoint = CheckpointFiles.of(model, backbone.directory)
    vars(model.config).pop("quantization_config", None)  # what it describes is read as floats
    if checkpoint.mismatched and not options:
        mismatched = checkpoint.mismatched[0]
        raise UserError(
            f"{context}: {mismatched} has another shape in its weights than config.json says; fetch it again"
        )
    report = {"missing_keys": checkpoint.missing, "mismatched_keys": checkpoint.mismatched}
    finalize_model(model, report, backbone=backbone, task=task)
    model.checkpoint = checkpoint
    return model


def empty_model(
    auto: Any, name: str | Path | Backbone, *, dtype: torch.dtype, dropout: float | None = None, **options: Any
) -> PreTrainedModel:
    """Build the model of transformers' class `auto` for a backbone, in evaluation mode, parameters on meta, weights
    tied.

    dropout: as in `load_backbone`.
    options: config settings that differ from config.json.
    """
    from accelerate import init_empty_weights
    from transformers import GenerationConfig

    backbone = open_backbone(name)
    with quiet_transformers(), torch.random.fork_rng(devices=[]):
        config = configure_backbone(backbone, options, dropout=dropout)
        with init_empty_weights(include_buffers=False):
            model: Any = auto.from_config(config, dtype=dtype, trust_remote_code=False)
        model.tie_weights()
        if model.can_generate() and (backbone.directory / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(backbone.directory)
    _keep_precision(model, dtype)
    return model.eval()


def _keep_precision(model: Any, dtype: torch.dtype) -> None:
    """Give the parameters that transformers keeps in float32 whatever the precision that dtype."""
    patterns = [re.compile(glob.replace("*", ".*")) for glob in model._get_dtype_plan(dtype)]
    for name, parameter in list(model.named_parameters()):
        if any(pattern.search(name) for pattern in patterns):
            owner, _, leaf = name.rpartition(".")
            wide = nn.Parameter(torch.empty_like(parameter, dtype=torch.float32), requires_grad=parameter.requires_grad)
            setattr(model.get_submodule(owner), leaf, wide)


def configure_backbone(backbone: Backbone, settings: dict[str, Any], *, dropout: float | None) -> Any:
    """Return the configuration of `backbone` with `settings`, and with `dropout` (None: its own rates) for every
    dropout key of it and of its nested configurations.

    The probability of skipping a whole layer (`layerdrop`) is only changed by 0, which turns off all randomness. Raises
    UserError for a rate above 0 if there is no key for it.
    """
    config = backbone.own_config(settings)
    if dropout is not None:
        rates = [(owner, key) for owner, key, _ in dropout_rates(config) if dropout == 0 or "layerdrop" not in key]
        for owner, key in rates:
            setattr(owner, key, dropout)
        if dropout and not rates:
            raise UserError("train.backbone_dropout: config.json of this backbone names no dropout; leave it out, or 0")
    return config


def check_dropout(model: Any, dropout: float | None, context: str) -> None:
    """Raise UserError if the backbone still draws dropout masks although `dropout` is 0."""
    if dropout == 0 and uses_dropout(model):
        raise UserError(
            f"{context}: it has dropout that its configuration does not name, so train.backbone_dropout: 0 cannot turn "
            "it off; leave the setting out"
        )


def finalize_model(model: Any, report: dict[str, Any], *, backbone: Backbone, task: BackboneTask) -> None:
    """Check a model against transformers' loading `report`, freeze it and record its origin.

    Raises UserError for an encoder used as a language model, and for missing weights other than a new head's.
    """
    check_causal(model.config, task, backbone.where)
    model.new_parameters = _new_parameters(model, report, task, backbone.where)
    model.name_or_path = backbone.recorded_name
    model.config.use_cache = False
    _set_pad_token(model, backbone)
    model.requires_grad_(False)
    head = model.get_output_embeddings()
    if head is not None:
        head.register_forward_pre_hook(_make_contiguous)


def _make_contiguous(module: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Make the hidden states passed to the output embedding contiguous. For a slice (B, 1, D), as in generation,
    torch's matmul with a frozen (D, V) weight makes B products, each of which copies the weight in bf16 on a CPU: 335
    MB per sequence at V = 262,144 and D = 640. A contiguous input is one product."""
    return tuple(value.contiguous() if isinstance(value, torch.Tensor) else value for value in inputs)


_make_contiguous.keeps_values = True  # type: ignore[attr-defined]  # read by `flatshift.regularizers.layers.fused`


def _set_pad_token(model: Any, backbone: Backbone) -> None:
    """Set the config's pad token to the one that sequences are padded with: decoder heads use it to find the last
    token, and many config.json name none, or another than their tokenizer pads with (`Backbone.tokenizer`).

    transformers' heads read a decoder's state at the last token that is not the config's pad token, and ignore the
    attention mask, so config, tokenizer and data have to agree. A config whose positions are counted from its pad token
    (RoBERTa) is kept. Without a tokenizer in the directory a missing pad token becomes the end-of-sequence token.
    """
    position_modules = (m for n, m in model.named_modules() if "position" in n.rsplit(".", 1)[-1])
    if any(getattr(module, "padding_idx", None) is not None for module in position_modules):
        return
    config, text = model.config, model.config.get_text_config()
    eos = getattr(text, "eos_token_id", None)
    own = [getattr(owner, "pad_token_id", None) for owner in (config, text)]
    pads = [*own, *(eos[:1] if isinstance(eos, list) else [eos])]
    vocabulary = getattr(text, "vocab_size", None)
    if backbone.has_tokenizer and (vocabulary is None or backbone.tokenizer.pad_token_id < vocabulary):
        pads.insert(0, backbone.tokenizer.pad_token_id)
    config.pad_token_id = text.pad_token_id = next((pad for pad in pads if pad is not None), None)


def _new_parameters(
    model: PreTrainedModel, report: dict[str, Any], task: BackboneTask, context: str
) -> tuple[str, ...]:
    """Return the parameters missing from the checkpoint; only those of a task's own head may be missing."""
    mismatched = {entry[0] if isinstance(entry, tuple | list) else entry for entry in report["mismatched_keys"]}
    missing = sorted({*report["missing_keys"], *mismatched})
    prefix = model.base_model_prefix + "."
    required = [n for n in missing if not task.traits.has_new_head or (n.startswith(prefix) and ".pooler." not in n)]
    if required:
        others = f" and {len(required) - 1} more" if len(required) > 1 else ""
        for entry in report["mismatched_keys"]:
            if isinstance(entry, tuple | list) and entry[0] in required and len(entry) == 3:
                stored, expected = (list(shape) for shape in entry[1:])
                raise UserError(
                    f"{context}: config.json makes {entry[0]} {expected} and the weights have {stored}{others}; one of "
                    "the two is of another model, fetch the backbone again"
                )
        raise UserError(
            f"{context}: its weights lack {required[0]}{others}; the checkpoint is not complete or not of this kind"
        )
    return tuple(missing)
