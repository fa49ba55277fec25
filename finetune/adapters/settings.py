"""Convert `flatshift.finetune.config.Adapter` to PEFT's `LoraConfig`, checking every name against the backbone's
modules.

**Mixtures of experts.** transformers stores the experts of a block in fused parameters (E, out, in), which are not
linear layers; PEFT adapts them as parameters (`target_parameters`): an A and a B for each expert, r·E rows and columns
in total. In some such models PEFT takes linear layers with former names of expert layers (`gate_proj` of a shared
expert) for those, and would skip them and train the router. Here they are LoRA layers like all others; in a saved
adapter they are named as parameters, with the same factors, so that PEFT reads them (`saved_as_parameters`).
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ..compute.protocols import TraitsTask
from ..config import Adapter, match_pattern
from ..errors import UserError
from ..models.anatomy import head_module, is_conv1d, is_linear, non_language_modules
from .offsets import lora_layers

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel
    from transformers import PreTrainedModel


_HEADS = {"classifier", "score"}  # heads that PEFT trains in full by itself (its task type SEQ_CLS)
_PEFT_TYPES = {
    "AutoModelForCausalLM": "CAUSAL_LM",
    "AutoModelForSeq2SeqLM": "SEQ_2_SEQ_LM",
    "AutoModelForSequenceClassification": "SEQ_CLS",
}
"""PEFT's task type by the transformers class; PEFT has none for others."""
_BIAS = {None: "none", "all": "all", "adapted": "lora_only"}
_BLOCK_LISTS = ("layers", "h", "layer", "block", "blocks")


def lora_config(
    backbone: PreTrainedModel, adapter: Adapter, *, task: TraitsTask, new_parameters: Iterable[str]
) -> LoraConfig:
    """Return PEFT's settings for a LoRA adapter with PEFT's default initialisation (`adapter.init` is applied later).

    new_parameters: parameters missing from the checkpoint, which train in full.

    Raises UserError: a name that no module of the backbone has or that has no effect; incompatible settings.
    """
    from peft import LoraConfig

    targets: str | list[str] = [adapter.targets] if isinstance(adapter.targets, str) else list(adapter.targets)
    if not targets:
        raise UserError("adapter.targets is empty; name module suffixes or all-linear")
    if targets == ["all-linear"]:
        targets = "all-linear"
    else:
        for suffix in targets:
            _require_module(backbone, suffix, "adapter.targets", linear=True, hint=", or all-linear")
            names = [n for n, m in backbone.named_modules() if _can_have_lora(m) and _is_in_layers(n, adapter.layers)]
            if not any(_has_suffix(name, suffix) for name in names):
                raise UserError(f"adapter.targets: {suffix!r} is in none of adapter.layers; leave one of them out")
    _check_layers(backbone, adapter)
    for suffix in adapter.exclude or ():
        _require_module(backbone, suffix, "adapter.exclude", linear=True)
    parameters: list[str] = []
    ranks: dict[str, int] = dict(adapter.ranks or {})
    alphas = adapter.numerators
    # parameters (E, ·, ·) that hold the experts of each block
    fused = [name for name, p in backbone.named_parameters() if p.ndim == 3 and _EXPERTS.search(name)]
    if adapter.experts is not None and not fused:
        raise UserError("adapter.experts: this backbone has no mixture of experts in its blocks; leave it at null")
    if fused:
        targets = _without_routers(_linear_names(backbone, adapter, targets, task), adapter.targets)
        if adapter.experts is not None:
            parameters = [name for name in fused if _is_in_layers(name, adapter.layers)]
            ranks |= dict.fromkeys(parameters, adapter.experts)
            alphas |= dict.fromkeys(parameters, adapter.numerator_of(adapter.experts))
        _check_experts(adapter, parameters, renamed_layers(backbone, targets))
    elif non_language_modules(backbone):
        targets = _language_names(backbone, _linear_names(backbone, adapter, targets, task), adapter.targets)
    elif adapter.layers is not None and targets == "all-linear":
        targets = _linear_names(backbone, adapter, targets, task)
    full_modules = _fully_trained_modules(backbone, adapter)
    if adapter.bias is not None and not any(name.endswith("bias") for name, _ in backbone.named_parameters()):
        raise UserError("adapter.bias: this backbone has no biases to train; leave it out")
    task_type = _PEFT_TYPES.get(task.traits.auto_class)
    return LoraConfig(
        task_type=None if adapts_head(adapter, new_parameters) else task_type,  # else PEFT would train the head in full
        r=adapter.rank,
        lora_alpha=adapter.numerator,  # type: ignore[arg-type]
        lora_dropout=adapter.dropout,
        target_modules=targets,
        target_parameters=parameters or None,
        exclude_modules=list(adapter.exclude) if adapter.exclude else None,
        layers_to_transform=list(adapter.layers) if adapter.layers is not None and not fused else None,
        rank_pattern=ranks,
        alpha_pattern=alphas,
        modules_to_save=[*_new_modules_outside_head(backbone, task, new_parameters), *full_modules] or None,
        bias=_BIAS[adapter.bias],  # type: ignore[arg-type]
        use_rslora=adapter.rslora,
        use_dora=adapter.dora,
        init_lora_weights=True,
        fan_in_fan_out=any(is_conv1d(m) for m in backbone.modules()),
    )


def with_saved_ranks(config: LoraConfig, directory: str | Path) -> LoraConfig:
    """Return `config` with the layers, ranks and alphas of the adapter in `directory` (chosen by EVA)."""
    from peft import LoraConfig

    saved = LoraConfig.from_pretrained(str(directory))
    names = ("target_modules", "rank_pattern", "alpha_pattern")
    return dataclasses.replace(config, **{name: getattr(saved, name) for name in names})


def check_patterns(model: PeftModel, adapter: Adapter) -> None:
    """Raise UserError if a name in `adapter.ranks` or `adapter.alphas` matches no adapted layer, or if two of them give
    one layer different values: PEFT takes the first, and its file does not preserve their order."""
    layers = list(lora_layers(model))
    for setting in ("ranks", "alphas"):
        for pattern in getattr(adapter, setting) or {}:
            if not any(match_pattern({pattern: True}, name, False) for name in layers):
                leaves = sorted({name.rsplit(".", 1)[-1] for name in layers})
                raise UserError(
                    f"adapter.{setting}: no adapted layer is called {pattern!r}; {_suggest_names(pattern, leaves)}"
                )
    for setting, values in (("ranks", adapter.ranks or {}), ("alphas", adapter.numerators)):
        for layer in layers:
            names = [name for name in values if match_pattern({name: True}, layer, False)]
            second = next((name for name in names if values[name] != values[names[0]]), None)
            if second is not None:
                raise UserError(
                    f"adapter.{setting}: {names[0]!r} and {second!r} both name {layer}, with {values[names[0]]:g} and "
                    f"{values[second]:g} (where only a rank is given, alpha follows it); let each layer have one name"
                )


def _require_module(backbone: nn.Module, suffix: str, setting: str, *, linear: bool, hint: str = "") -> None:
    names = [n for n, m in backbone.named_modules() if n and (not linear or _can_have_lora(m))]
    if not any(_has_suffix(name, suffix) for name in names):
        leaves = sorted({name.rsplit(".", 1)[-1] for name in names if not name.rsplit(".", 1)[-1].isdigit()})
        kind = "linear layer" if linear else "module"
        raise UserError(
            f"{setting}: no {kind} of this backbone is called {suffix!r}; {_suggest_names(suffix, leaves)}{hint}"
        )


def _suggest_names(name: str, leaves: list[str]) -> str:
    nearest = difflib.get_close_matches(name.rsplit(".", 1)[-1], leaves, n=3, cutoff=0.3)
    return (f"nearest: {', '.join(nearest)}; all: " if nearest else "there are ") + ", ".join(leaves)


def _has_suffix(name: str, suffix: str) -> bool:
    return name == suffix or name.endswith(f".{suffix}")


def _can_have_lora(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding) or is_linear(module)


def _linear_names(backbone: PreTrainedModel, adapter: Adapter, targets: str | list[str], task: TraitsTask) -> list[str]:
    from peft import LoraConfig
    from peft.tuners.tuners_utils import _maybe_include_all_linear_layers

    if isinstance(targets, str):
        config = LoraConfig(target_modules=targets, task_type=_PEFT_TYPES.get(task.traits.auto_class))
        resolved: Any = _maybe_include_all_linear_layers(config, backbone)
        names = sorted(resolved.target_modules)
    else:
        names = [
            n for n, m in backbone.named_modules() if _can_have_lora(m) and any(_has_suffix(n, t) for t in targets)
        ]
    names = [name for name in names if not any(_has_suffix(name, suffix) for suffix in adapter.exclude or ())]
    return [name for name in names if _is_in_layers(name, adapter.layers)]


def _language_names(backbone: PreTrainedModel, names: list[str], targets: str | tuple[str, ...]) -> list[str]:
    """Return the `names` in the language model, and elsewhere (a vision tower) only those matched by a target that
    matches nothing in the language model."""
    prefixes = tuple(f"{name}." for name in non_language_modules(backbone))
    language = [name for name in names if not name.startswith(prefixes)]
    suffixes = () if isinstance(targets, str) else targets
    others = [suffix for suffix in suffixes if not any(_has_suffix(name, suffix) for name in language)]
    return [name for name in names if name in language or any(_has_suffix(name, suffix) for suffix in others)]


def _is_in_layers(name: str, layers: tuple[int, ...] | None) -> bool:
    if layers is None:
        return True
    pairs = itertools.pairwise(name.split("."))
    index = next((int(b) for a, b in pairs if a in _BLOCK_LISTS and b.isdigit()), None)
    return index in layers


def _check_layers(backbone: PreTrainedModel, adapter: Adapter) -> None:
    if adapter.layers is None:
        return
    count = int(getattr(backbone.config.get_text_config(), "num_hidden_layers", 0))
    if count and max(adapter.layers) >= count:
        raise UserError(
            f"adapter.layers: there is no block {max(adapter.layers)}; this backbone has {count}, from 0 to {count - 1}"
        )


def _fully_trained_modules(backbone: PreTrainedModel, adapter: Adapter) -> list[str]:
    """Return the full names for `adapter.train_whole`: by suffix, PEFT would match `input_layernorm` for `norm`."""
    names = []
    for suffix in adapter.train_whole or ():
        _require_module(backbone, suffix, "adapter.train_whole", linear=False)
        for name, module in backbone.named_modules():
            if name and _has_suffix(name, suffix):
                names.append(name)
                parameters, inner = set(module.parameters()), set(module.modules())
                for sharing, holder in backbone.named_modules():
                    if holder not in inner and not parameters.isdisjoint(holder._parameters.values()):
                        raise UserError(
                            f"adapter.train_whole: {name} shares its weight with {sharing}, and only one of them would "
                            "train; give both a LoRA adapter by adapter.targets, or take a backbone whose weights are "
                            "not tied"
                        )
    return names


def _new_modules_outside_head(backbone: PreTrainedModel, task: TraitsTask, new_parameters: Iterable[str]) -> list[str]:
    """Return the modules missing from the checkpoint (BERT's pooler) and those of the head, other than PEFT's own
    `classifier`/`score`: they train too. For a masked-LM head these are the layers before the output layer, whose
    weight is the tied embedding and whose bias stays 0."""
    owners = {name.rsplit(".", 1)[0] for name in new_parameters}
    if not task.traits.is_sequence_level:
        output = backbone.get_output_embeddings()
        modules = {owner: backbone.get_submodule(owner) for owner in owners}
        return sorted(o for o, m in modules.items() if m is not output and not any(True for _ in m.children()))
    head = head_module(backbone)
    owners |= {name.rsplit(".", 1)[0] for name, _ in backbone.named_parameters() if name.split(".")[0] == head}
    return sorted(o for o in owners if not _HEADS & set(o.split(".")))


def adapts_head(adapter: Adapter, new_parameters: Iterable[str]) -> bool:
    """True if `adapter.targets` names the new head itself, which then trains by LoRA."""
    targets = () if isinstance(adapter.targets, str) else adapter.targets
    heads = {name.rsplit(".", 2)[-2] for name in new_parameters} & _HEADS
    return any(target.rsplit(".", 1)[-1] in heads for target in targets)


def is_fully_trained(module: str, backbone: Any) -> bool:
    """True if a module of a classification backbone trains in full: of the head, or missing from the checkpoint."""
    heads = {*_HEADS, head_module(backbone)}
    return bool(heads & set(module.split("."))) or module in {n.rsplit(".", 1)[0] for n in backbone.new_parameters}


_ROUTERS = ("gate", "router", "shared_expert_gate")
_EXPERTS = re.compile(r"(^|\.)experts\.(gate_up_proj|down_proj|gate_proj|up_proj)$")


def _without_routers(names: Sequence[str], targets: str | tuple[str, ...]) -> list[str]:
    """Return `names` without routers. Raises UserError if `targets` names one, or no other name is left."""
    routers = [name for name in names if not set(_ROUTERS).isdisjoint(name.split("."))]
    if routers and targets != "all-linear":
        raise UserError(
            f"adapter.targets: {routers[0]} decides which experts see a token and stays frozen; take "
            f"{routers[0].rsplit('.', 1)[-1]} out"
        )
    if len(routers) == len(names):
        raise UserError("adapter.targets, adapter.layers and adapter.exclude leave no layer to adapt")
    return [name for name in names if name not in routers]


def renamed_layers(backbone: PreTrainedModel, names: Iterable[str]) -> list[str]:
    """Return those of the linear layers `names` that PEFT takes for former expert layers of this mixture of experts."""
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    def is_renamed(leaf: str) -> bool:
        config = LoraConfig(target_modules=[leaf])
        try:
            convert_peft_config_for_transformers(config, backbone, None)
        except ValueError:  # it asks for the other layers of the fused parameter
            return True
        return config.target_modules != {leaf}

    leaves = {leaf: is_renamed(leaf) for leaf in {name.rsplit(".", 1)[-1] for name in names}}
    return [name for name in names if leaves[name.rsplit(".", 1)[-1]]]


def saved_as_parameters(config: Any, backbone: Any) -> Any:
    """Return `config` as it is written to a file: `renamed_layers` as parameters, each with its rank and alpha, and
    then without dropout, which PEFT has for modules alone."""
    targets: Any = getattr(config, "target_modules", None)  # soft tokens have none
    renamed = [] if targets is None or isinstance(targets, str) else renamed_layers(backbone, sorted(targets))
    if not renamed:
        return config

    def by_parameter(pattern: dict[str, Any]) -> dict[str, Any]:
        values = {name: match_pattern(pattern, name, None) for name in renamed}
        return pattern | {f"{name}.weight": value for name, value in values.items() if value is not None}

    return dataclasses.replace(
        config,
        target_modules=sorted(set(config.target_modules or ()) - set(renamed)),
        target_parameters=sorted([*(config.target_parameters or ()), *(f"{name}.weight" for name in renamed)]),
        rank_pattern=by_parameter(config.rank_pattern or {}),
        alpha_pattern=by_parameter(config.alpha_pattern or {}),
        lora_dropout=0.0,
    )


def _check_experts(adapter: Adapter, parameters: Sequence[str], renamed: Sequence[str]) -> None:
    """Raise UserError for a setting that PEFT does not have for its adapters of parameters: of experts while they
    train, of `renamed` layers in a file."""
    if not (parameters or renamed):
        return
    settings = {
        "adapter.dropout": adapter.dropout > 0 and bool(parameters),
        "adapter.dora": adapter.dora,
        f"adapter.init: {adapter.init}": adapter.init != "default",
        "adapter.under": adapter.under is not None,
    }
    for name, used in settings.items():
        if used:
            raise UserError(
                f"{name} does not go with adapters on experts: PEFT keeps that of {[*parameters, *renamed][0]} as one "
                "of a whole tensor; set adapter.targets to the attention's layers and leave adapter.experts at null, "
                "or leave it off"
            )
