"""Quantise a frozen backbone to 4 or 8 bits (`train.quantization`) with bitsandbytes: QLoRA (2305.14314), LLM.int8()
(2208.07339).

Linear layers are quantised while the weight files are read; embeddings, norms, heads and trained layers stay floats. A
layer computes with its dequantised values in `train.precision`. On a CPU int8 layers do so in training and also
quantise activations in evaluation; on CUDA they always quantise activations.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..config import Quantization
from ..errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

KINDS: tuple[Quantization, ...] = ("nf4", "nf4-double", "int8")
BLOCK = 64
"""Values of a 4-bit weight that share a scale."""
GET = "pip install 'flatshift[quant]'"


def check_available(kind: Quantization | None) -> None:
    """Raise UserError if `kind` is unknown or needs a missing package; bitsandbytes is not imported."""
    if kind is None:
        return
    if kind not in KINDS:
        raise UserError(f"train.quantization: {kind!r} is not known; take {', '.join(KINDS)} or null")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(f"train.quantization: {kind} needs the package bitsandbytes; {GET}, or leave it at null")


def import_bitsandbytes() -> Any:
    """Import bitsandbytes; raises UserError if it cannot be loaded.

    On CPUs with bf16 instructions it would fetch a kernel from the model hub if the package `kernels` is installed;
    code from there is never run, and that kernel would not be used here.
    """
    absent = "kernels" not in sys.modules
    if absent:
        sys.modules["kernels"] = None  # type: ignore[assignment]
    try:
        with _quiet_bitsandbytes():
            import bitsandbytes
    except (ImportError, OSError, RuntimeError) as error:
        raise UserError(f"the package bitsandbytes cannot be loaded ({error}); {GET}, or reinstall it") from error
    finally:
        if absent:
            del sys.modules["kernels"]
    return bitsandbytes


@contextlib.contextmanager
def _quiet_bitsandbytes() -> Iterator[None]:
    """Suppress bitsandbytes' log lines; in some precisions it writes one for each matrix product."""
    log = logging.getLogger("bitsandbytes")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def gradient_problem(kind: Quantization, device: str) -> str | None:
    """Return the reason why a small layer of this kind passes no gradient on `device`; None if it does."""
    import torch

    library = import_bitsandbytes()
    try:
        if kind == "int8":
            layer = library.nn.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False, threshold=6.0)
        else:
            double = kind == "nf4-double"
            layer = library.nn.Linear4bit(64, 64, bias=False, compress_statistics=double, quant_type="nf4")
        layer.weight.data.copy_(torch.eye(64) + 0.1)
        layer = layer.to(device)
        x = torch.ones(4, 64, device=device, requires_grad=True)
        with _quiet_bitsandbytes():
            layer(x).sum().backward()
        finite = x.grad is not None and bool(x.grad.isfinite().all()) and bool(x.grad.any())
        return None if finite else "it gives no gradient"
    except (RuntimeError, NotImplementedError, OSError, TypeError, ValueError, AttributeError) as error:
        return str(error).splitlines()[0] if str(error) else type(error).__name__


def loading_options(
    kind: Quantization, skeleton: Any, *, dtype: torch.dtype, device: torch.device | str, context: str
) -> dict[str, Any]:
    """Return the additional arguments of `from_pretrained`.

    skeleton: the model on meta (`flatshift.finetune.models.meta.build_skeleton`).
    dtype: of the computation, and of everything not quantised.

    Raises UserError: no layer of the model can be quantised.
    """
    from transformers import BitsAndBytesConfig
    from transformers.quantizers.quantizers_utils import should_convert_module

    unquantized = _unquantized_modules(skeleton, kind)
    layers = (name for name, module in skeleton.named_modules() if _input_width(module))
    if not any(should_convert_module(name, unquantized) for name in layers):
        wide = "" if kind == "int8" else f" with a multiple of {BLOCK} inputs"
        raise UserError(
            f"{context} has no linear layer{wide} besides its head, so train.quantization: {kind} would change "
            "nothing; leave it at null"
        )
    config = BitsAndBytesConfig(
        load_in_8bit=kind == "int8",
        load_in_4bit=kind != "int8",
        llm_int8_skip_modules=unquantized,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=kind == "nf4-double",
        bnb_4bit_compute_dtype=dtype,
    )
    return {"quantization_config": config, "device_map": {"": device}}


def quantize_skeleton(skeleton: Any, kind: Quantization, *, context: str) -> None:
    """Replace the layers of a model on meta (`flatshift.finetune.models.meta.build_skeleton`) that `from_pretrained`
    would quantise by bitsandbytes' layers; the weights of 4-bit layers are floats on meta until they are packed.

    Raises UserError as `loading_options`, or if bitsandbytes cannot be loaded.
    """
    import torch
    from torch import nn
    from transformers.quantizers.auto import AutoHfQuantizer

    import_bitsandbytes()
    options = loading_options(kind, skeleton, dtype=skeleton.dtype, device="meta", context=context)
    quantizer = AutoHfQuantizer.from_config(options["quantization_config"], pre_quantized=False)
    quantizer.preprocess_model(skeleton, device_map=None)
    quantizer.postprocess_model(skeleton)
    for module in skeleton.modules():
        if is_four_bit(module):
            # a plain parameter, which PEFT takes for floats; its attributes are those that PEFT's layer reads
            shape = module.weight.shape
            weight: Any = nn.Parameter(torch.empty(shape, dtype=skeleton.dtype, device="meta"), requires_grad=False)
            weight.compress_statistics, weight.quant_type = kind == "nf4-double", "nf4"
            module.weight, module.compress_statistics = weight, kind == "nf4-double"


def quantize_weight(layer: Any, weight: Tensor) -> Any:
    """Return the parameter of a layer of `quantize_skeleton` with the values of a whole weight, on its device."""
    library = import_bitsandbytes()
    if layer.source_cls.__name__ == "Conv1D":
        weight = weight.T
    if is_four_bit(layer):
        options = {"compress_statistics": layer.compress_statistics, "quant_type": "nf4", "module": layer}
        return library.nn.Params4bit(weight.contiguous(), requires_grad=False, **options).to(weight.device)
    return library.nn.Int8Params(weight.contiguous().cpu(), requires_grad=False).to(weight.device)


def is_four_bit(module: Any) -> bool:
    """True for a 4-bit layer of bitsandbytes."""
    return is_quantized(module) and type(module).__name__ == "Linear4bit"


def _unquantized_modules(skeleton: Any, kind: Quantization) -> list[str]:
    """Return the modules that stay floats: heads and tied weights, as in transformers; new ones, which train; and for 4
    bits those whose rows do not end on a block of scales, which bitsandbytes 0.50 reads wrongly on CPUs."""
    from transformers.quantizers.base import get_keys_to_not_convert

    from .anatomy import head_module

    new = {name.rpartition(".")[0] for name in getattr(skeleton, "new_parameters", ())}
    odd = {name for name, module in skeleton.named_modules() if kind != "int8" and _input_width(module) % BLOCK}
    return sorted({*get_keys_to_not_convert(skeleton), *new, *odd, head_module(skeleton)} - {""})


def _input_width(module: Any) -> int:
    """Return the columns of the weight of a layer that can be quantised; 0 for others."""
    from .anatomy import is_conv1d  # imports torch

    if is_conv1d(module):
        return int(module.nx)
    return int(module.in_features) if type(module).__name__ == "Linear" else 0


def prepare_quantized(model: nn.Module) -> None:
    """Make a quantised `model` trainable after evaluation; other models are left unchanged.

    On CPUs with bf16 instructions bitsandbytes would repack 4-bit weights in place at the first evaluation: the scales
    are rounded to bf16, and from then on gradients do not flow.
    """
    for module in model.modules():
        if is_quantized(module):
            logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
            if hasattr(module, "support_avx512bf16_for_cpu"):
                vars(module)["support_avx512bf16_for_cpu"] = False


def is_quantized(module: Any) -> bool:
    """True for a layer of bitsandbytes."""
    return type(module).__module__.startswith("bitsandbytes.")


def describe_quantization(model: nn.Module, kind: Quantization) -> str:
    """Describe in one line for the log how many adapted layers are quantised."""
    bases = [module.base_layer for module in model.modules() if hasattr(module, "base_layer")]
    quantized = sum(map(is_quantized, bases))
    floats = f"; {len(bases) - quantized} stay floats" if quantized < len(bases) else ""
    return f"backbone in {kind}: {quantized} of {len(bases)} adapted layers{floats}"


def quantization_scales(model: nn.Module) -> dict[str, Tensor]:
    """Return, by name, the tensors of quantised weights that are neither parameters nor buffers."""
    scales: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if not is_quantized(module):
            continue
        weight: Any = module.weight
        state: Any = getattr(weight, "quant_state", None) or getattr(module, "quant_state", None)
        if state is not None:
            parts = {} if state.state2 is None else {"nested": state.state2.absmax, "offset": state.offset}
            if "absmax" not in module._parameters:
                parts["absmax"] = state.absmax
            scales |= {f"{name}.weight.{part}": tensor for part, tensor in parts.items()}
        row_scales = getattr(weight, "SCB", None)
        if row_scales is None:
            row_scales = getattr(getattr(module, "state", None), "SCB", None)
        if row_scales is not None:
            scales[f"{name}.weight.SCB"] = row_scales
    return scales
