"""Matching of a family's tensor-parallel plan (`flatshift.finetune.models.families`) with a model's modules, and
checks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ...errors import UserError
from ...models.anatomy import is_linear, unwrap_peft
from ...models.families import ExpertRegion, TensorParallelRegion, TensorPlan, tensor_plan


@dataclass
class MatchedRegion:
    """A region of one block as modules: LoRA layers if adapted, else plain linear layers."""

    region: TensorParallelRegion
    entry: nn.Module
    columns: dict[str, nn.Module]
    row: nn.Module
    block: str
    attention: tuple[int, int]
    """Heads of queries, and of keys and values."""

    @property
    def width(self) -> int:
        """Channels between column layers and row layer."""
        row: Any = getattr(self.row, "base_layer", self.row)
        return int(row.nx if hasattr(row, "nx") else row.in_features)

    def shared_heads(self, tp: int) -> set[str]:
        """Return the columns that stay whole on each of `tp` ranks: keys and values whose heads do not divide."""
        if not self.region.heads or self.region.gathered or self.attention[1] % tp == 0:
            return set()
        return {name for name in self.columns if name.endswith(("k_proj", "v_proj"))}


@dataclass
class MatchedExperts:
    """Stacked experts of one block, inside the layers of PEFT that adapt them."""

    region: ExpertRegion
    name: str
    block: nn.Module
    """The module with the experts and their router."""
    outer: nn.Module

    @property
    def adapters(self) -> dict[str, Any]:
        """Return PEFT's nested layers by the parameter that each adapts."""
        layers, layer = {}, self.outer
        while hasattr(layer, "lora_A"):
            layers[str(layer.parameter_name)] = layer
            layer = layer.base_layer  # type: ignore[assignment]
        return layers

    @property
    def experts(self) -> Any:
        """Return the module that has the parameters."""
        return self.outer.get_base_layer() if hasattr(self.outer, "lora_A") else self.outer  # type: ignore[operator]


@dataclass
class PlanMatch:
    """Modules of this model (or pipeline stage) that match a plan, in order."""

    plan: TensorPlan
    attention: tuple[int, int]
    """Heads of queries, and of keys and values."""
    blocks: dict[str, nn.Module] = field(default_factory=dict)
    regions: list[MatchedRegion] = field(default_factory=list)
    biases: list[tuple[TensorParallelRegion, nn.Module]] = field(default_factory=list)
    """Entry modules with a bias to slice: also of a block of which a pipeline stage has nothing else."""
    experts: list[MatchedExperts] = field(default_factory=list)
    whole: list[str] = field(default_factory=list)
    """Linear layers between the regions of a mixture of experts, whole on every rank."""
    embeddings: dict[str, nn.Embedding] = field(default_factory=dict)
    wrapped: dict[str, nn.Module] = field(default_factory=dict)
    """Embeddings or an output head wrapped by PEFT."""
    head: nn.Linear | None = None
    norm: nn.Module | None = None
    depth: int = 0
    """Blocks of the whole model."""


def match_plan(model: nn.Module) -> PlanMatch:
    """Match the plan of `model` (transformers or PEFT) with its modules; blocks of other pipeline stages have no
    parameters and are omitted. Raises UserError if its model type has no plan, or for a layer in a block that the plan
    does not cover."""
    base: Any = unwrap_peft(model)
    plan = tensor_plan(base.config.model_type)
    heads = base.config.num_attention_heads
    attention = heads, getattr(base.config, "num_key_value_heads", None) or heads
    match = PlanMatch(plan, attention, depth=base.config.num_hidden_layers)
    for name, module in base.named_modules():
        has_parameters = any(True for _ in module.parameters())
        if _has_suffix(name, plan.blocks) and has_parameters:
            modules = dict(module.named_modules())
            match.biases += [(r, modules[r.entry]) for r in plan.regions if r.bias and f"{r.entry}.{r.bias}" in modules]
            if any(True for _ in linear_layers(module)):
                match.blocks[name] = module
                match.experts += _match_experts(plan, name, modules)
                match.regions += _match_regions(match, name, modules)
        elif any(_has_suffix(name, suffix) for suffix in plan.embeddings):
            if isinstance(module, nn.Embedding):
                match.embeddings[name] = module
            else:
                match.wrapped[name] = module
        elif plan.norm and _has_suffix(name, plan.norm) and not name.startswith(tuple(match.blocks)):
            match.norm = module if "Norm" in type(module).__name__ else None  # another stage's is replaced
    try:
        head = base.get_output_embeddings() if plan.embeddings else None
    except AttributeError:  # on another pipeline stage
        head = None
    if isinstance(head, nn.Linear):
        match.head = head
    elif head is not None:
        match.wrapped["the output head"] = head
    return match


def linear_layers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the linear layers under `module` as in the base model, counting a LoRA layer as one."""
    yielded: list[str] = []
    for name, child in module.named_modules():
        inner = any(name.startswith(f"{outer}.") for outer in yielded)
        if not inner and (hasattr(child, "lora_A") or is_linear(child)):
            yielded.append(name)
            yield name, child


def _match_experts(plan: TensorPlan, block: str, modules: dict[str, nn.Module]) -> list[MatchedExperts]:
    return [
        MatchedExperts(region, f"{block}.{region.entry}", modules[region.block], modules[region.entry])
        for region in plan.experts
        if region.entry in modules
    ]


def _match_regions(match: PlanMatch, block: str, modules: dict[str, nn.Module]) -> list[MatchedRegion]:
    plan = match.plan
    present = [region for region in plan.regions if region.entry in modules and region.row in modules]
    known = {layer for region in present for layer in (*region.columns, region.row)}
    known |= {region.entry for region in plan.experts}
    foreign = [layer for layer, _ in linear_layers(modules[""]) if layer not in known]
    if plan.experts:
        entries = tuple(f"{region.entry}." for region in present)
        match.whole += [f"{block}.{layer}" for layer in foreign if not layer.startswith(entries)]
        foreign = [layer for layer in foreign if layer.startswith(entries)]
    if foreign or (len(present) < 2 and not plan.experts):
        raise UserError(
            f"mesh.tp: {block}.{foreign[0] if foreign else plan.regions[0].entry} of this model is not as the "
            "tensor-parallel plan of its type expects; leave mesh.tp at 1 and use mesh.dp"
        )
    return [
        MatchedRegion(
            region,
            modules[region.entry],
            {layer: modules[layer] for layer in region.columns if layer in modules},
            modules[region.row],
            block,
            match.attention,
        )
        for region in present
    ]


def _has_suffix(name: str, suffix: str) -> bool:
    return re.search(rf"(^|\.){re.escape(suffix).replace(re.escape('*'), '[0-9]+')}$", name) is not None


def check_tensor_plan(model: nn.Module, *, tp: int, sequence_parallel: bool) -> None:
    """Raise UserError for a base model or adapter that `tensor_parallel` cannot slice into `tp` parts, or for
    `sequence_parallel` where the plan has none, or without tensor parallelism; parameters may be on the meta device.
    """
    if tp == 1:
        if sequence_parallel:
            raise UserError(
                "mesh.sequence_parallel splits tokens along tp, but mesh.tp is 1; set mesh.tp or leave it off"
            )
        return
    base, match = unwrap_peft(model), match_plan(model)
    tensor_plan(base.config.model_type, sequence_parallel=sequence_parallel)
    if sequence_parallel and (outside := _find_outside(match)) is not None:
        raise UserError(
            f"mesh.sequence_parallel: {outside} of this mixture of experts is whole on every rank of mesh.tp and takes "
            "all tokens; leave it off"
        )
    if (misfit := _find_misfit(match, tp)) is not None:
        fitting = (n for n in range(1, match.attention[0] + 1) if _find_misfit(match, n) is None)
        nearest = min(fitting, key=lambda n: (abs(n - tp), n))
        raise UserError(
            f"mesh.tp: {tp} {misfit} of this backbone; nearest that does for all its layers: mesh.tp {nearest}"
        )
    for matched in match.regions:
        for layer_name, layer in {**matched.columns, matched.region.row: matched.row}.items():
            _check_layer(f"{matched.block}.{layer_name}", layer)
    vocabulary: dict[str, nn.Module] = {**match.embeddings, **match.wrapped}
    if match.head is not None:
        vocabulary["the output head"] = match.head
    for name, module in vocabulary.items():
        if any(parameter.requires_grad for parameter in module.parameters()):
            raise UserError(
                f"mesh.tp: {name} trains or has an adapter, but the vocabulary is cut along tp only where it is "
                "frozen; take it out of adapter.targets, or leave mesh.tp at 1"
            )


def _find_outside(match: PlanMatch) -> str | None:
    """Return a layer of a mixture of experts that is whole on every rank, outside of the experts' own modules."""
    inside = tuple(
        f"{experts.name.removesuffix(experts.region.entry)}{experts.region.block}." for experts in match.experts
    )
    return next((name for name in match.whole if not name.startswith(inside)), None)


def _find_misfit(match: PlanMatch, tp: int) -> str | None:
    """Return the first size that `tp` ranks cannot share, the most informative first, as `does not divide the 3 heads`;
    None if they can share all."""
    if tp == 1:
        return None
    heads = [matched for matched in match.regions if matched.region.heads and not matched.region.gathered]
    queries, key_values = match.attention
    if heads and queries % tp:
        return f"does not divide the {queries} attention heads"
    if key_values % tp and not all(hasattr(matched.entry, "num_key_value_groups") for matched in heads):
        return f"does not divide the {key_values} key-value heads"
    for matched in heads:
        layers = tuple(f"{matched.block}.{name}" for name in (*matched.columns, matched.region.row))
        for name, parameter in matched.entry.named_parameters(f"{matched.block}.{matched.region.entry}"):
            head = matched.width // queries
            if not name.startswith(layers) and parameter.numel() > head and matched.region.bias not in name.split("."):
                return f"does not divide {name}, a norm over all heads,"
    sizes = [("tokens of the vocabulary", embedding.num_embeddings) for embedding in match.embeddings.values()]
    if match.head is not None:
        sizes.append(("tokens of the output head", match.head.out_features))
    for matched in match.regions:
        channels = matched.width
        sizes.append((f"channels of {matched.block}.{matched.region.entry}", channels))
        columns: list[Any] = [getattr(layer, "base_layer", layer) for layer in matched.columns.values()]
        if matched.region.gathered and any(size % tp for size in (channels, *(x.out_features for x in columns))):
            return f"does not divide the {channels} {sizes[-1][0]}"
    for matched_experts in match.experts:
        for name, dim, fused in matched_experts.region.parameters:
            size = getattr(matched_experts.experts, name).shape[dim] // fused
            sizes.append((f"channels of {matched_experts.name}.{name}", size))
    for name, size in sizes:
        if -(-size // tp) * (tp - 1) >= size:
            return f"leaves a rank without any of the {size} {name}"
    return None


def _check_layer(name: str, layer: Any) -> None:
    if len(getattr(layer, "lora_variant", ())) > len(getattr(layer, "lora_magnitude_vector", ())):
        raise UserError(
            f"mesh.tp: the adapter of {name} is a LoRA variant other than DoRA, which cannot be cut along tp; leave "
            "mesh.tp at 1"
        )
    base = getattr(layer, "base_layer", layer)
    whole = [p for n, p in layer.named_parameters() if p.requires_grad and ".lora_" not in f".{n}"]
    biased = [m for m in getattr(layer, "lora_B", {}).values() if m.bias is not None]
    if whole or biased or not is_linear(base):
        raise UserError(
            f"mesh.tp: {name} trains more than the A and B of a LoRA adapter, which cannot be cut along tp; "
            "train adapters only or leave mesh.tp at 1"
        )
