"""Load a frozen backbone with its weights on one device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from ..compute.capabilities import preserve_rng_state
from ..compute.cuda_status import direct_load_kwargs
from ..compute.matmul_rate import DTYPES
from ..compute.precision import loading_dtype, widen_on_use
from ..config import Precision, Quantization
from ..errors import UserError, first_error_line
from . import quantize
from .backbone import REFUSED, Backbone, BackboneTask, auto_class, loading_error, open_backbone, quiet_transformers
from .checkpoint import weight_reader
from .dequantize import has_quantized_files
from .meta import build_skeleton, check_dropout, configure_backbone, finalize_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_backbone(
    name: str | Path | Backbone,
    *,
    task: BackboneTask,
    num_labels: int | None = None,
    label_names: Sequence[str] | None = None,
    precision: Precision = "fp32",
    narrow: bool = False,
    quantization: Quantization | None = None,
    dropout: float | None = None,
    device: str | torch.device = "cpu",
) -> PreTrainedModel:
    """Load the backbone for `task` on `device` with every parameter frozen and the key-value cache off.

    num_labels: width of the head (Classify); by default the number of `label_names`.
    label_names: class names in head order, stored in the config.
    precision: dtype that the whole backbone is cast to while it is read (`auto`: the faster one on `device`); the
        adapter attached later is float32 in either case.
    narrow: store its weights in bf16 regardless and widen each when it is used
        (`flatshift.finetune.compute.precision`).
    quantization: store its linear layers in 4 or 8 bits (`flatshift.finetune.models.quantize`).
    dropout: its own dropout rates during training; None for those of config.json.

    The names of parameters that the checkpoint lacks (a new head) are stored in `model.new_parameters`;
    `attach_adapter` initialises and trains them. The global random state is not touched.

    Raises UserError: as `open_backbone`; or transformers has no class of this task for it; or weights are missing; or
    it cannot be quantised, is already quantised, or bitsandbytes is missing.
    """
    quantize.check_available(quantization)
    backbone = open_backbone(name)
    directory, where = backbone.directory, backbone.where
    auto, settings = auto_class(task, num_labels=num_labels, label_names=label_names)
    # a checkpoint's head for other classes is replaced by a new one
    options: dict[str, Any] = {"ignore_mismatched_sizes": True} if task.traits.is_sequence_level else {}
    dtype = loading_dtype(precision, directory, device, narrow=narrow)
    if has_quantized_files(directory):
        own = cast("Precision", next(name for name, stored in DTYPES.items() if stored == dtype))
        model = build_skeleton(
            backbone, task=task, num_labels=num_labels, label_names=label_names, precision=own, dropout=dropout
        )
        _fill_skeleton(model, device=torch.device(device), quantization=quantization, context=where)
        if narrow:
            widen_on_use(model, context=where)
        quantize.prepare_quantized(model)
        return model
    if quantization is not None:
        quantize.import_bitsandbytes()  # import it here first: `import_library` keeps it from fetching code
        skeleton = build_skeleton(
            backbone, task=task, num_labels=num_labels, label_names=label_names, precision=precision
        )
        options |= quantize.loading_options(quantization, skeleton, dtype=dtype, device=device, context=where)
    else:
        options |= direct_load_kwargs(torch.device(device))
    try:
        # transformers initialises missing weights from the global generators; their state is restored afterwards.
        with quiet_transformers(), preserve_rng_state([torch.device(device)]):
            loaded: Any = auto.from_pretrained(
                directory, config=configure_backbone(backbone, settings, dropout=dropout), dtype=dtype,
                use_safetensors=True, trust_remote_code=False, output_loading_info=True, **options,
            )  # fmt: skip
    except UserError:
        raise
    except REFUSED as error:
        raise loading_error(error, task, where) from error
    except Exception as error:
        if type(error).__name__ != "SafetensorError":
            raise
        raise UserError(f"{where}: its weights are damaged or cut short: {first_error_line(error)}") from error
    model, report = loaded
    check_dropout(model, dropout, where)
    finalize_model(model, report, backbone=backbone, task=task)
    if narrow:
        widen_on_use(model, context=where)
    quantize.prepare_quantized(model)
    return model if quantization is not None else model.to(device)  # quantised weights are on it already


@torch.no_grad()
def _fill_skeleton(model: Any, *, device: torch.device, quantization: Quantization | None, context: str) -> None:
    """Read the weights of a skeleton from quantised files, one at a time, and quantise them by `quantization`."""
    read = weight_reader(model)
    if quantization is not None:
        quantize.quantize_skeleton(model, quantization, context=context)
    for name, parameter in list(model.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        layer: Any = model.get_submodule(owner)
        if name in model.new_parameters:
            value = torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)
        else:
            value = read(name).to(device, parameter.dtype)
        if leaf == "weight" and quantize.is_quantized(layer):
            layer.weight = quantize.quantize_weight(layer, value)
        else:
            layer._parameters[leaf] = torch.nn.Parameter(value, requires_grad=False)
    model.tie_weights()
    for name, buffer in model.named_buffers():
        if name in model.checkpoint.keys:
            buffer.copy_(read(name))
    model.to(device)
