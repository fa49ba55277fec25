"""LoRA adapters through PEFT: attached with name-seeded weights, saved in PEFT's own format, read back and compared.

PEFT wraps the frozen model, then every trainable tensor is initialised by its own name, so no value depends on the
order of construction, on the layout over a mesh or on global state.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..atomic import atomic_directory, write_json
from ..compute.capabilities import preserve_rng_state
from ..compute.numerics import answer_in_float32
from ..compute.protocols import TraitsTask
from ..config import Adapter
from ..digests import check_adapter
from ..errors import UserError
from ..models.backbone import open_backbone
from ..models.checkpoint import canonical_name
from ..seeds import torch_generator
from . import soft_tokens
from .initial_values import SUBTRACTED_INITS, Calibration, collect_statistics, initialise, require_calibration
from .offsets import (
    ADAPTER,
    LowRankOffset,
    append_offsets,
    factor_names,
    fold_offsets,
    folded_offsets,
    lora_layers,
    saved_config,
    split_offsets,
)
from .saved import SETTINGS, SavedAdapter
from .settings import adapts_head, check_patterns, lora_config, saved_as_parameters, with_saved_ranks
from .soft_tokens import attach_soft_tokens, check_projector, read_projector, write_projector

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel
    from transformers import PreTrainedModel

WEIGHTS = "adapter_model.safetensors"


def attach_adapter(
    backbone: PreTrainedModel,
    adapter: Adapter,
    *,
    task: TraitsTask,
    seed: int,
    dtype: torch.dtype = torch.float32,
    initial: str | Path | None = None,
    calibration: Calibration | None = None,
) -> PeftModel:
    """Wrap `backbone` (in place) with PEFT: LoRA on `adapter.targets`, and for Classify and Regress the head, all in
    `dtype`.

    A ~ Kaiming uniform with a = √5 as in PEFT, B = 0, both and a new head seeded by (`seed`, name); the global random
    state is preserved. Other initial values by `adapter.init` (`flatshift.finetune.adapters.initial_values`).

    initial: an adapter saved by `save_adapter` from a model with these settings, from which the result of
    `adapter.init` or `adapter.under` is loaded instead of computed: the parts folded into the frozen weights, and A and
    B.
    calibration: training examples, for an `adapter.init` that needs them and has no `initial`.

    Raises UserError: a target suffix that no module has, a setting PEFT rejects, an `initial` with other settings.
    """
    if adapter.soft_tokens is not None:
        return attach_soft_tokens(backbone, adapter, task=task, seed=seed, dtype=dtype)
    new_parameters = tuple(getattr(backbone, "new_parameters", ()))
    config = lora_config(backbone, adapter, task=task, new_parameters=new_parameters)
    if initial is not None and adapter.init == "eva":
        config = with_saved_ranks(config, initial)
    deviation = float(getattr(backbone.config, "initializer_range", 0.02))

    @torch.no_grad()
    def initialise_by_name(name: str, parameter: nn.Parameter) -> None:
        parameter.copy_(initial_value(name, parameter.shape, seed, deviation))

    for name in new_parameters:
        initialise_by_name(name, backbone.get_parameter(name))
    if initial is None and adapter.init in ("corda", "lora-ga"):
        collect_statistics(backbone, config, adapter, require_calibration(adapter, calibration))
    model = _wrap_with_peft(backbone, config)
    if adapts_head(adapter, new_parameters):  # under LoRA it trains too, so that it is saved: no checkpoint has it
        for name, parameter in model.named_parameters():
            if canonical_name(name) in new_parameters:
                parameter.requires_grad_(True)
    check_patterns(model, adapter)
    for parameter in trainable(model).values():
        parameter.data = parameter.data.to(dtype)
    if task.traits.has_targets:
        answer_in_float32(model)
    for name, parameter in trainable(model).items():
        if ".lora_" in name and ".lora_magnitude_vector" not in name:  # a magnitude starts as the backbone's row norm
            initialise_by_name(name, parameter)
    if adapter.init != "default" or adapter.under is not None:
        _apply_init(model, adapter, seed=seed, initial=initial, calibration=calibration)
    return model


def _apply_init(
    model: PeftModel, adapter: Adapter, *, seed: int, initial: str | Path | None, calibration: Calibration | None
) -> None:
    dtypes = {name: parameter.dtype for name, parameter in trainable(model).items()}
    if initial is not None:
        factors, offsets = split_offsets(read_adapter(initial), model)
        if not offsets and (adapter.init in SUBTRACTED_INITS or adapter.under is not None):
            setting = "adapter.under" if adapter.under is not None else f"adapter.init: {adapter.init}"
            raise UserError(f"{initial}: this adapter does not hold what {setting} folded into the frozen weights")
        copy_tensors(lora_only(factors), lora_only(trainable(model)), context=str(initial))
        fold_offsets(model, offsets, context=str(initial))
    elif adapter.under is not None:
        fold_offsets(model, read_adapter_under(adapter.under, model), context="adapter.under")
    else:
        weights = None
        if adapter.init == "loftq":
            weights = open_backbone(str(model.get_base_model().name_or_path)).directory
        initialise(model, adapter, seed=seed, calibration=calibration, weights=weights)
    for name, parameter in trainable(model).items():  # EVA creates new factors of other ranks
        parameter.data = parameter.data.to(dtypes.get(name, next(iter(dtypes.values()))))


def read_adapter_under(name: str, model: PeftModel) -> dict[str, LowRankOffset]:
    """Return the parts that the frozen adapter `name` under the trained one (`adapter.under`) folds into each layer of
    `model`, without the layer's own scale, in the dtype of the layer's factors, as they will be saved with them.

    The layer then computes W + s_u·B_u A_u + s·BA, of which A and B train; the saved adapter is the sum of both as one
    adapter of rank r_u + r, which does not depend on `name`.

    Raises UserError: no such adapter, one of another backbone, one that is more than a sum (DoRA, a head), or layers
    that `model` does not adapt.
    """
    context = "adapter.under"
    saved = SavedAdapter.find(name, context=context)
    saved.require_backbone(open_backbone(str(model.get_base_model().name_or_path)), context=context)
    tensors = read_adapter(saved.path)
    if saved.settings.get("use_dora"):
        raise UserError(
            f"{context}: {name} is of DoRA, whose weight change is no sum; merge it into the backbone first"
        )
    if whole := sorted(tensor for tensor in tensors if ".lora_" not in tensor):
        raise UserError(f"{context}: {name} also holds {whole[0]}, which is no adapter; take one without a head")
    layers, live, offsets = lora_layers(model), trainable(model), {}
    for layer, (_, scale) in saved.scales(tensors).items():
        if layer not in layers:
            raise UserError(
                f"{context}: {name} adapts {layer}, and this recipe does not; add {layer.rsplit('.', 1)[-1]} to "
                "adapter.targets"
            )
        names = factor_names(layers[layer], layer)
        a, b = (tensors[factor].float() for factor in names)
        weight, factor = layers[layer].get_base_layer().weight, live[names[0]]
        if a.shape[1] != factor.shape[1] or b.shape[0] not in weight.shape:
            raise UserError(
                f"{context}: {layer} of {name} has the shape {tuple(a.shape)}, which is of another backbone"
            )
        b = b * (scale / layers[layer].scaling[ADAPTER])
        offsets[layer] = LowRankOffset(a.to(weight.device, factor.dtype), b.to(weight.device, factor.dtype))
    return offsets


def attach_on_meta(backbone: PreTrainedModel, adapter: Adapter, *, task: TraitsTask, dtype: torch.dtype) -> PeftModel:
    """Wrap a backbone without weights (`flatshift.finetune.models.meta`) in the same way; no tensor has a value yet.

    dtype: of everything that trains.
    """
    new_parameters = tuple(getattr(backbone, "new_parameters", ()))
    config = lora_config(backbone, adapter, task=task, new_parameters=new_parameters)
    model = _wrap_with_peft(backbone, config, low_cpu_mem_usage=True, autocast_adapter_dtype=False)
    check_patterns(model, adapter)
    for parameter in trainable(model).values():
        parameter.data = parameter.data.to(dtype)
    if task.traits.has_targets:
        answer_in_float32(model)
    return model


def _wrap_with_peft(backbone: PreTrainedModel, config: LoraConfig, **options: Any) -> PeftModel:
    from peft import get_peft_model

    try:
        # PEFT initialises from the global generator and warns about Conv1D; both are contained here.
        devices = {p.device for p in backbone.parameters()}
        with preserve_rng_state(devices), warnings.catch_warnings(), _without_renaming():
            warnings.simplefilter("ignore")
            return get_peft_model(backbone, config, **options)
    except (ValueError, ImportError) as error:  # ImportError: of an installed torchao that is too old for PEFT
        refused = "these settings" if isinstance(error, ValueError) else "an installed package; upgrade or remove it"
        raise UserError(f"adapter: PEFT refuses {refused}: {str(error).splitlines()[0]}") from error


@contextmanager
def _without_renaming() -> Iterator[None]:
    """Make PEFT adapt the layers that are named, also those with a name that experts had before transformers 5
    (`flatshift.finetune.adapters.settings`)."""
    from peft.utils import transformers_weight_conversion

    conversion: Any = transformers_weight_conversion
    convert = conversion.convert_peft_config_for_transformers
    conversion.convert_peft_config_for_transformers = lambda peft_config, model, conversions: None
    try:
        yield
    finally:
        conversion.convert_peft_config_for_transformers = convert


def initial_value(name: str, shape: torch.Size | tuple[int, ...], seed: int, deviation: float) -> torch.Tensor:
    """Return the initial value of a trained tensor, unsharded, float32, drawn by (`seed`, plain `name`) on the CPU.

    A ~ Kaiming uniform (a = √5) and B = 0 as in PEFT; for embeddings A = 0, B ~ N(0, 1). Tensors missing from the
    checkpoint: N(0, deviation²), norms 1, biases 0.
    """
    generator = torch_generator(seed, "init", name)
    value = torch.zeros(tuple(shape))
    if ".lora_A." in name:
        nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=generator)
    elif name.endswith(".lora_embedding_B"):
        value = torch.randn(value.shape, generator=generator)
    elif ".lora_" not in name:
        if value.ndim >= 2:
            value = torch.randn(value.shape, generator=generator) * deviation
        elif name.lower().endswith("norm.weight"):
            value.fill_(1.0)
    return value


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained parameters by plain name: as in the backbone, without PEFT's wrappers and adapter name."""
    return {canonical_name(name): p for name, p in model.named_parameters() if p.requires_grad}


def save_adapter(model: PeftModel, directory: str | Path) -> Path:
    """Write `model`'s adapter as a PEFT directory, atomically, and compare the file bit for bit with the live tensors.

    Parts folded into the frozen weights (`flatshift.finetune.adapters.offsets`) are written too, as further rows of A
    and columns of B: the file fits the backbone as it is on disk.

    Raises UserError: a value is NaN or infinite; nothing is written to `directory`. Raises RuntimeError: the file
    misses a tensor, differs from a live one, or would be empty; nothing is written either.
    """
    directory = Path(directory)
    trained = trainable(model)
    if folded_offsets(model):
        return write_adapter(model, append_offsets(trained, model), directory)
    config: Any = model.peft_config[ADAPTER]
    has_head = any(f"{layer}.weight" in trained for layer in lora_layers(model))  # a head under LoRA is skipped by PEFT
    has_biases = getattr(config, "bias", "none") != "none" and config.modules_to_save  # PEFT writes the modules' twice
    if has_head or has_biases or saved_as_parameters(config, model.get_base_model()) is not config:
        return write_adapter(model, trained, directory)
    with atomic_directory(directory) as temporary:
        vars(model)["create_or_update_model_card"] = lambda folder: None  # PEFT's empty card, 50 ms of template
        try:
            model.save_pretrained(str(temporary), safe_serialization=True, save_embedding_layers=False)
        finally:
            del vars(model)["create_or_update_model_card"]
        write_projector(model, temporary)
        _check_written(temporary, trained, directory)
    return directory


def write_adapter(model: PeftModel, tensors: Mapping[str, torch.Tensor], directory: str | Path) -> Path:
    """Write unsharded `tensors` (by plain name) as a PEFT directory with the configuration of `model`, atomically.

    Writes the same files as `save_adapter`, but the tensors need not be in this process's model. Read back and
    compared.

    Raises UserError: a value is NaN or infinite; nothing is written to `directory`. Raises RuntimeError: the file
    differs from the tensors, or would be empty; nothing is written either.
    """
    import copy

    from safetensors.torch import save_file

    directory = Path(directory)
    config = saved_config(model) if folded_offsets(model) else copy.copy(model.peft_config[ADAPTER])
    config = saved_as_parameters(config, model.get_base_model())
    config.inference_mode = True
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = str(model.get_base_model().name_or_path)
    layers = lora_layers(model)
    host = {peft_tensor_name(name, layers): tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with atomic_directory(directory) as temporary:
        config.save_pretrained(str(temporary))
        save_file(host, temporary / WEIGHTS, metadata={"format": "pt"})
        _check_written(temporary, tensors, directory)
    return directory


def _check_written(temporary: Path, tensors: Mapping[str, torch.Tensor], directory: Path) -> None:
    settings = json.loads((temporary / SETTINGS).read_text(encoding="utf-8"))
    if isinstance(targets := settings.get("target_modules"), list):  # a set, in another order in every process
        write_json(temporary / SETTINGS, settings | {"target_modules": sorted(targets)})
    check_saved(_read_tensors(temporary), tensors)
    _require_finite(tensors, str(directory), "the adapter is not saved; take a smaller optimizer.lr")


def peft_tensor_name(name: str, layers: Mapping[str, Any]) -> str:
    """Return the name in PEFT's file for a trained parameter's plain name.

    layers: the adapted layers by plain name; their own bias (and newly initialised weight) is in the layer that PEFT
    wraps.
    """
    owner, _, leaf = name.rpartition(".")
    if owner in layers and not leaf.startswith("lora_"):
        name = f"{owner}.base_layer.{leaf}"
    if name.endswith(".lora_magnitude_vector.weight"):
        name = name.removesuffix(".weight")
    return f"base_model.model.{name}"


def read_adapter(directory: str | Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a saved adapter by plain name (as `trainable`). Raises UserError: no such file, not
    safetensors, not what its run saved (`flatshift.finetune.digests`), or a value that is NaN or infinite."""
    check_adapter(Path(directory))
    tensors = _read_tensors(directory)
    _require_finite(tensors, str(Path(directory) / WEIGHTS), "take another adapter")
    return tensors


def _read_tensors(directory: str | Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = Path(directory) / WEIGHTS
    if not file.is_file():
        if pickles := sorted(Path(directory).glob("adapter_model.[bp]*")):
            raise UserError(f"{pickles[0]} may be a pickle, which is never read nor shipped; save it as {WEIGHTS}")
        raise UserError(f"{directory}: no adapter here ({WEIGHTS} is missing)")
    try:
        own = load_file(file)
        # PEFT's copies of frozen embeddings, of the output too
        copies = {re.split(r"\.lora_embedding_A|(?<=\.lm_head)\.lora_A", n)[0] + ".base_layer.weight" for n in own}
        tensors = {canonical_name(n): tensor for n, tensor in own.items() if n not in copies}
        tensors = {soft_tokens.WEIGHT if n == soft_tokens.IN_FILE else n: tensor for n, tensor in tensors.items()}
        return tensors | read_projector(directory)
    except SafetensorError as error:
        raise UserError(f"{file} is damaged or cut short: {error}") from error


def check_saved(saved: Mapping[str, torch.Tensor], live: Mapping[str, torch.Tensor]) -> None:
    """Raise RuntimeError unless the tensors `saved`, read back from a file, equal `live`, by name and bit for bit."""
    if not live or not any(t.numel() for t in saved.values()):
        raise RuntimeError("the adapter to be saved is empty")
    if saved.keys() != live.keys():
        raise RuntimeError(
            f"the saved adapter has other tensors than the live one: {sorted(saved.keys() ^ live.keys())[:4]}"
        )
    for name, tensor in live.items():
        if not _is_bit_equal(saved[name], tensor):
            raise RuntimeError(f"the saved adapter differs from the live one in {name}")


def _require_finite(tensors: Mapping[str, torch.Tensor], context: str, fix: str) -> None:
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise UserError(f"{context}: {name} has values that are NaN or infinite; {fix}")


def _is_bit_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    b = b.detach().cpu()
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def load_adapter(model: PeftModel, directory: str | Path, *, partial: bool = False) -> None:
    """Copy a saved adapter into `model`'s own (built by `attach_adapter` with the same settings), exactly.

    partial: LoRA tensors only; a head that only one side has is skipped (a warm-up continued by another task).

    Raises UserError: no adapter in `directory`, or one of another shape or whose features enter elsewhere.
    """
    source, target = read_adapter(directory), dict[str, torch.Tensor](trainable(model))
    check_projector(model, directory)
    if live := folded_offsets(model):
        source, offsets = split_offsets(source, model)
        if offsets.keys() != live.keys() or not all(
            _is_bit_equal(offset.a, live[name].a) and _is_bit_equal(offset.b, live[name].b)
            for name, offset in offsets.items()
        ):
            raise UserError(
                f"{directory}: this adapter was begun with other parts folded into the frozen weights than the model"
            )
    if partial:
        source, target = shared_lora(source, target, present=target)
    copy_tensors(source, target, context=str(directory))


def lora_only(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Drop heads and other modules that train in full."""
    return {name: tensor for name, tensor in tensors.items() if ".lora_" in name}


def shared_lora(
    source: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor], *, present: Iterable[str]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the LoRA tensors of the body of a saved and a live adapter, which a stage passes to one with another head.

    Fully trained modules are dropped, and LoRA tensors outside the numbered blocks that only one side has (a masked-LM
    head's transform, BERT's pooler). A block that only one side has is kept, so that `copy_tensors` raises for it.

    present: names of the live adapter over all ranks.
    """

    def select(tensors: Mapping[str, torch.Tensor], known: set[str]) -> dict[str, torch.Tensor]:
        return {
            name: tensor
            for name, tensor in lora_only(tensors).items()
            if name in known or any(part.isdecimal() for part in name.split("."))
        }

    return select(source, set(present)), select(target, set(source))


@torch.no_grad()
def copy_tensors(source: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor], *, context: str) -> None:
    """Copy tensors by name; names and shapes must agree, else UserError that starts with `context`."""
    if unmatched := sorted(source.keys() ^ target.keys()):
        raise UserError(
            f"{context}: this adapter belongs to other settings or another backbone ({unmatched[0]} has no partner)"
        )
    for name, tensor in target.items():
        if source[name].shape != tensor.shape:
            raise UserError(
                f"{context}: {name} has the shape {tuple(source[name].shape)} and the model wants {tuple(tensor.shape)}"
            )
    for name, tensor in target.items():
        tensor.copy_(source[name])
