"""LoRA adapters through PEFT: attached with name-seeded weights, saved in PEFT's own format, read back and compared.

The order is the one that sharding needs later (design §7): PEFT wraps the frozen model, then every trainable tensor
gets its values from its own name, so no draw depends on the order of construction, on the layout or on global state.
"""

from __future__ import annotations

import difflib
import math
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .atomic import replacing_directory
from .config import Adapter, Classify, Task
from .errors import UserError
from .seeds import torch_generator

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel
    from transformers import PreTrainedModel

WEIGHTS = "adapter_model.safetensors"
_ADAPTER = "default"


# --------------------------------------------------------------------------------------------- attaching


def attach_adapter(backbone: PreTrainedModel, adapter: Adapter, *, task: Task, seed: int) -> PeftModel:
    """Wrap `backbone` (in place) by PEFT: LoRA on `adapter.targets`, and for Classify the head, all float32.

    A ~ Kaiming uniform with a = √5 as in PEFT, B = 0, both and a new head drawn by (`seed`, name); the global random
    state is left as it was.

    Raises:
        UserError: a target suffix that no module has, a setting PEFT refuses.
    """
    new = tuple(getattr(backbone, "new_parameters", ()))
    config = _lora_config(backbone, adapter, task=task, new=new)
    initialise_new(backbone, new, seed=seed)
    model = _wrap(backbone, config)
    for parameter in trainable(model).values():
        parameter.data = parameter.data.float()
    initialise_lora(model, seed=seed)
    return model


def _lora_config(backbone: PreTrainedModel, adapter: Adapter, *, task: Task, new: Iterable[str]) -> LoraConfig:
    from peft import LoraConfig

    targets: str | list[str] = _targets(backbone, adapter.targets)
    return LoraConfig(
        task_type="SEQ_CLS" if isinstance(task, Classify) else "CAUSAL_LM",
        r=adapter.rank,
        lora_alpha=adapter.alpha if adapter.alpha is not None else 2 * adapter.rank,  # type: ignore[arg-type]
        lora_dropout=adapter.dropout,
        target_modules=targets,
        modules_to_save=_new_outside_head(new) or None,
        use_rslora=adapter.rslora,
        use_dora=adapter.dora,
        fan_in_fan_out=any(type(m).__name__ == "Conv1D" for m in backbone.modules()),
    )


def _targets(backbone: PreTrainedModel, targets: str | tuple[str, ...]) -> str | list[str]:
    wanted = [targets] if isinstance(targets, str) else list(targets)
    if wanted == ["all-linear"]:
        return "all-linear"
    if not wanted:
        raise UserError("adapter.targets is empty; name module suffixes or all-linear")
    names = [n for n, m in backbone.named_modules() if _can_have_lora(m)]
    for suffix in wanted:
        if not any(name == suffix or name.endswith(f".{suffix}") for name in names):
            leaves = sorted({name.rsplit(".", 1)[-1] for name in names})
            nearest = difflib.get_close_matches(suffix.rsplit(".", 1)[-1], leaves, n=3, cutoff=0.3)
            raise UserError(
                f"adapter.targets: no linear layer of this backbone is called {suffix!r}; "
                + (f"nearest: {', '.join(nearest)}; all: " if nearest else "there are ")
                + f"{', '.join(leaves)}, or all-linear"
            )
    return wanted


def _can_have_lora(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | nn.Embedding) or type(module).__name__ == "Conv1D"


def _new_outside_head(new: Iterable[str]) -> list[str]:
    """Modules that the checkpoint lacked apart from PEFT's own `classifier`/`score` (BERT's pooler): they train too."""
    owners = {name.rsplit(".", 1)[0] for name in new}
    return sorted(o for o in owners if not {"classifier", "score"} & set(o.split(".")))


def _wrap(backbone: PreTrainedModel, config: LoraConfig) -> PeftModel:
    from peft import get_peft_model

    try:
        # PEFT initialises from the global generator and warns about Conv1D; both stay inside.
        with torch.random.fork_rng(devices=_cuda_devices(backbone)), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return get_peft_model(backbone, config)
    except ValueError as error:
        raise UserError(f"adapter: PEFT refuses these settings: {str(error).splitlines()[0]}") from error


def _cuda_devices(model: nn.Module) -> list[torch.device]:
    return list({p.device for p in model.parameters() if p.device.type == "cuda"})


@torch.no_grad()
def initialise_new(backbone: PreTrainedModel, new: Iterable[str], *, seed: int) -> None:
    """Values by (seed, name) for what the checkpoint lacked: N(0, initializer_range), norms 1, biases 0."""
    deviation = float(getattr(backbone.config, "initializer_range", 0.02))
    for name in new:
        parameter = backbone.get_parameter(name)
        if parameter.ndim >= 2:
            draw = torch.randn(parameter.shape, generator=torch_generator(seed, "init", name))
            parameter.copy_(draw * deviation)
        else:
            parameter.fill_(1.0 if name.lower().endswith("norm.weight") else 0.0)


@torch.no_grad()
def initialise_lora(model: PeftModel, *, seed: int) -> None:
    """Values by (seed, name), drawn whole on the CPU and then copied: A ~ Kaiming uniform (a = √5), B = 0.

    For embeddings as PEFT: A = 0, B ~ N(0, 1). DoRA magnitudes keep PEFT's row norms, those of the backbone as BA = 0.
    """
    for name, parameter in trainable(model).items():
        generator = torch_generator(seed, "init", name)
        if ".lora_A." in name:
            value = torch.empty(parameter.shape)
            nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=generator)
            parameter.copy_(value)
        elif name.endswith(".lora_embedding_B"):
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        elif ".lora_B." in name or name.endswith(".lora_embedding_A"):
            parameter.zero_()


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that train, by plain name: as in the backbone, without PEFT's wrappers and adapter name."""
    return {plain_name(name): p for name, p in model.named_parameters() if p.requires_grad}


def plain_name(name: str) -> str:
    """`base_model.model.a.q_proj.lora_A.default.weight` → `a.q_proj.lora_A.weight`."""
    name = name.removeprefix("base_model.model.")
    name = name.replace(f".modules_to_save.{_ADAPTER}", "").replace(f".{_ADAPTER}", "")
    # PEFT's files leave out the last part of a DoRA magnitude's name
    return f"{name}.weight" if name.endswith(".lora_magnitude_vector") else name


# --------------------------------------------------------------------------------------------- saving and loading


def save_adapter(model: PeftModel, directory: str | Path) -> Path:
    """Write `model`'s adapter as a PEFT directory, atomically, and compare the file bit for bit with the live tensors.

    Raises:
        RuntimeError: the file misses a tensor, differs from a live one, or would be empty: nothing is put in place.
    """
    directory = Path(directory)
    with replacing_directory(directory) as temporary:
        model.save_pretrained(str(temporary), safe_serialization=True, save_embedding_layers=False)
        (temporary / "README.md").unlink(missing_ok=True)  # PEFT's empty model card
        _compare(read_adapter(temporary), trainable(model))
    return directory


def read_adapter(directory: str | Path) -> dict[str, torch.Tensor]:
    """The tensors of a saved adapter by plain name (as `trainable`).

    Raises:
        UserError: no such file, or not safetensors.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = Path(directory) / WEIGHTS
    if not file.is_file():
        raise UserError(f"{directory}: no adapter here ({WEIGHTS} is missing)")
    try:
        return {plain_name(name): tensor for name, tensor in load_file(file).items()}
    except SafetensorError as error:
        raise UserError(f"{file} is damaged or cut short: {error}") from error


def _compare(saved: Mapping[str, torch.Tensor], live: Mapping[str, torch.Tensor]) -> None:
    if not live or not any(t.numel() for t in saved.values()):
        raise RuntimeError("the adapter to be saved is empty")
    if saved.keys() != live.keys():
        raise RuntimeError(
            f"the saved adapter has other tensors than the live one: {sorted(saved.keys() ^ live.keys())[:4]}"
        )
    for name, tensor in live.items():
        if not _same_bits(saved[name], tensor):
            raise RuntimeError(f"the saved adapter differs from the live one in {name}")


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    b = b.detach().cpu()
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def load_adapter(model: PeftModel, directory: str | Path, *, partial: bool = False) -> None:
    """Copy a saved adapter into `model`'s own (built by `attach_adapter` with the same settings), exactly.

    partial: LoRA tensors only; a head that only one side has is left alone (a warm-up continued by another task).

    Raises:
        UserError: no adapter in `directory`, or one of another shape.
    """
    source, target = read_adapter(directory), trainable(model)
    if partial:
        source, target = _lora_only(source), _lora_only(target)
    copy_tensors(source, target, where=str(directory))


def _lora_only(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tensor for name, tensor in tensors.items() if ".lora_" in name}


@torch.no_grad()
def copy_tensors(source: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor], *, where: str) -> None:
    """Copy by name; names and shapes must agree, else UserError that begins with `where`."""
    odd = sorted(source.keys() ^ target.keys())
    if odd:
        raise UserError(
            f"{where}: this adapter belongs to other settings or another backbone ({odd[0]} has no partner)"
        )
    for name, tensor in target.items():
        if source[name].shape != tensor.shape:
            raise UserError(
                f"{where}: {name} has the shape {tuple(source[name].shape)} and the model wants {tuple(tensor.shape)}"
            )
    for name, tensor in target.items():
        tensor.copy_(source[name])


def describe_adapter(model: PeftModel) -> dict[str, Any]:
    """Counts for logs and reports: trained and frozen parameters, adapted layers."""
    live = trainable(model)
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    layers = sum(".lora_A." in name or ".lora_embedding_A" in name for name in live)
    return {"trained": sum(p.numel() for p in live.values()), "frozen": frozen, "layers": layers}
