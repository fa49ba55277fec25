"""What tensor parallelism refuses, before any weight is read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import nn

from ...errors import UserError
from ...models.anatomy import backbone_of, is_linear
from ...models.families import FAMILIES
from .plans import Found, find


def check_tensor_plan(model: nn.Module, *, tp: int, sequence_parallel: bool) -> None:
    """Refuse a backbone or adapter that `tensor_parallel` cannot cut; parameters may be on the meta device.

    Raises:
        UserError: no plan for the model type; heads, groups, widths or the vocabulary do not divide by `tp`; an adapter
            that cannot be cut; `sequence_parallel` where the plan has none, or without tensor parallelism.
    """
    if tp == 1:
        if sequence_parallel:
            raise UserError(
                "mesh.sequence_parallel splits tokens along tp, but mesh.tp is 1; set mesh.tp or leave it off"
            )
        return
    found = find(model)
    if sequence_parallel and not found.plan.sequence_parallel:
        kinds = [kind for kind, family in FAMILIES.items() if family.tensor.sequence_parallel]
        raise UserError(
            f"mesh.sequence_parallel: not for model type {backbone_of(model).config.model_type!r}, only for "
            f"{', '.join(kinds)}; leave it off"
        )
    _check_sizes(model, found, tp)
    _check_adapters(found)


def _check_sizes(model: nn.Module, found: Found, tp: int) -> None:
    sizes = list(_sizes(backbone_of(model), found))
    common = math.gcd(*(size for _, size in sizes))
    for what, size in sizes:
        if size % tp:
            nearest = min((n for n in range(1, common + 1) if common % n == 0), key=lambda n: (abs(n - tp), n))
            raise UserError(
                f"mesh.tp: {tp} does not divide the {size} {what} of this backbone; nearest that does for all its "
                f"layers: mesh.tp {nearest}"
            )


def _sizes(base: Any, found: Found) -> Iterator[tuple[str, int]]:
    """What must divide, each with a name, most telling first."""
    config = base.config
    yield "attention heads", config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None)
    if groups is not None:
        yield "key-value heads", groups
    for embedding in found.embeddings.values():
        yield "tokens of the vocabulary", embedding.num_embeddings
    if found.head is not None:
        yield "tokens of the output head", found.head.out_features
    for place in found.regions:
        if not place.region.heads:
            yield f"channels of {place.block}.{place.region.entry}", _inputs(place.row)


def _inputs(layer: Any) -> int:
    base = getattr(layer, "base_layer", layer)
    return base.nx if hasattr(base, "nx") else base.in_features


def _check_adapters(found: Found) -> None:
    for place in found.regions:
        for name, layer in {**place.columns, place.region.row: place.row}.items():
            _check_layer(f"{place.block}.{name}", layer)
    vocabulary: dict[str, nn.Module] = {**found.embeddings, **found.wrapped}
    if found.head is not None:
        vocabulary["the output head"] = found.head
    for name, module in vocabulary.items():
        if any(parameter.requires_grad for parameter in module.parameters()):
            raise UserError(
                f"mesh.tp: {name} trains or has an adapter, but the vocabulary is cut along tp only where it is "
                "frozen; take it out of adapter.targets, or leave mesh.tp at 1"
            )


def _check_layer(name: str, layer: Any) -> None:
    if getattr(layer, "lora_variant", None):
        raise UserError(
            f"mesh.tp: the adapter of {name} is a LoRA variant (DoRA) whose norms need whole rows; set adapter.dora "
            "to false or leave mesh.tp at 1"
        )
    base = getattr(layer, "base_layer", layer)
    whole = [p for n, p in layer.named_parameters() if p.requires_grad and ".lora_" not in f".{n}"]
    biased = [m for m in getattr(layer, "lora_B", {}).values() if m.bias is not None]
    if whole or biased or not is_linear(base):
        raise UserError(
            f"mesh.tp: {name} trains more than the A and B of a LoRA adapter, which cannot be cut along tp; "
            "train adapters only or leave mesh.tp at 1"
        )
