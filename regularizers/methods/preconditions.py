"""Checks shared by several regularizers: invalid settings, misuse of a step, a foreign state, and a layer already
hooked by another regularizer (recorded here, so that the model itself stays unmarked)."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flatshift.regularizers.errors import RegularizerError
from flatshift.regularizers.layers.sites import canonical_name, is_lora

if TYPE_CHECKING:
    from torch import Tensor, nn


_SERVED: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def mark_hooked(layers: Mapping[str, Any], owner: object) -> None:
    """Record that `layers` (modules by name) are hooked by the regularizer `owner`, all or none.

    Raises RegularizerError if one of them is hooked by another regularizer that is still attached.
    """
    for name, layer in layers.items():
        held = _SERVED.get(layer)
        if held is not None and held() is not None:
            raise RegularizerError(
                f"layer {name} serves another regularizer already; detach that one before attaching a second"
            )
    for layer in layers.values():
        _SERVED[layer] = weakref.ref(owner)


def release_hooked(owner: object) -> None:
    """Release all layers of `owner`; no-op if it has none."""
    for layer in [layer for layer, held in _SERVED.items() if held() is owner]:
        del _SERVED[layer]


SCHEDULES = ("constant", "linear", "cosine")


def require(holds: bool, key: str, value: object, wanted: str) -> None:
    """Raise RegularizerError naming the setting `key` unless it `holds` what is `wanted`."""
    if not holds:
        raise RegularizerError(f"regularizer.{key}: {value} is not {wanted}")


def require_nonnegative(key: str, value: float) -> None:
    """Raise RegularizerError unless `value` is a finite number ≥ 0."""
    require(math.isfinite(value) and value >= 0, key, value, "a number ≥ 0")


def check_step_entry(kind: str, t: int, *, attached: bool, inside: bool) -> None:
    """Raise RegularizerError for a step before `attach` or inside another step."""
    if not attached:
        raise RegularizerError(f"{kind} is not attached to a model; call attach(model, seed=..., total_steps=...)")
    if inside:
        raise RegularizerError(f"step({t}) begins inside another step; a step's context must be left first")


def check_not_attached(attached: bool) -> None:
    """Raise RegularizerError if the regularizer is attached."""
    if attached:
        raise RegularizerError("this regularizer is attached already; call detach() before attaching it again")


def lora_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return every LoRA layer of `model` (embeddings included) by canonical name."""
    return {canonical_name(name): module for name, module in model.named_modules() if is_lora(module)}


def check_state(
    state: Mapping[str, Tensor],
    expected: Mapping[str, tuple[int, ...]],
    *,
    kind: str,
    seed: int,
    whole: bool,
    seed_name: str | None = None,
) -> None:
    """Raise RegularizerError unless `state` has the names and shapes of `expected` and was drawn from `seed`.

    whole: this process has the whole model; otherwise other pipeline stages' tensors in `state` are allowed. The seed
    is the entry `seed_name`, by default `<kind>.seed`.
    """
    different = set(expected) ^ set(state) if whole else set(expected) - set(state)
    if different:
        raise RegularizerError(
            f"the saved state does not belong to {kind} on this model ({min(different)!r} is in only one of the two); "
            "resume with the regularizer, backbone and adapter that the checkpoint was written with"
        )
    for name, shape in expected.items():
        if tuple(state[name].shape) != tuple(shape):
            raise RegularizerError(
                f"the saved state has {name} of shape {tuple(state[name].shape)} where this model has {tuple(shape)}; "
                "resume with the backbone and adapter that the checkpoint was written with"
            )
    found = int(state[seed_name or f"{kind}.seed"])
    if found != seed:
        raise RegularizerError(
            f"the saved state was drawn from seed {found}, this run from {seed}; resume with the same train.seed"
        )
