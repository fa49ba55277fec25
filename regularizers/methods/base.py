"""Base class of the methods, and checks that they share: invalid settings, misuse of a step, a foreign state, and a
layer already hooked by another regularizer (recorded here, so that the model itself stays unmarked)."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from flatshift.regularizers.config import RegularizerError
from flatshift.regularizers.layers.sites import canonical_name, is_lora
from flatshift.regularizers.mesh import SINGLE_PROCESS, Placement
from flatshift.regularizers.protocol import Regularizer

_HOOKED: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()
SCHEDULES = ("constant", "linear", "cosine")


def require(holds: bool, key: str, value: object, requirement: str) -> None:
    """Raise RegularizerError naming the setting `key` unless it `holds` that `value` is what is required."""
    if not holds:
        raise RegularizerError(f"regularizer.{key}: {value} is not {requirement}")


def require_nonnegative(key: str, value: float) -> None:
    """Raise RegularizerError unless `value` is a finite number ≥ 0."""
    require(math.isfinite(value) and value >= 0, key, value, "a number ≥ 0")


def lora_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return every LoRA layer of `model` (embeddings included) by canonical name."""
    return {canonical_name(name): module for name, module in model.named_modules() if is_lora(module)}


class AttachedRegularizer(Regularizer):
    """Regularizer that hooks layers of one model between `attach` and `detach`."""

    def __init__(self, name: str, prefix: str) -> None:
        """name: in messages. prefix: of the names of the state's tensors."""
        self._name, self._prefix = name, prefix
        self._attached = self._inside = False
        self._placement: Placement = SINGLE_PROCESS
        self._seed = self._step = 0

    def _check_not_attached(self) -> None:
        if self._attached:
            raise RegularizerError("this regularizer is attached already; call detach() before attaching it again")

    def _finish_attach(self, layers: Mapping[str, Any], seed: int, placement: Placement) -> None:
        """Record that `layers` (modules by name) are hooked, all or none. Raises RegularizerError if one of them is
        hooked by another regularizer that is still attached."""
        for name, layer in layers.items():
            owner = _HOOKED.get(layer)
            if owner is not None and owner() is not None:
                raise RegularizerError(
                    f"layer {name} serves another regularizer already; detach that one before attaching a second"
                )
        for layer in layers.values():
            _HOOKED[layer] = weakref.ref(self)
        self._attached, self._placement, self._seed, self._step = True, placement, seed, 0

    @contextmanager
    def _in_step(self, t: int) -> Iterator[None]:
        """Record that step `t` runs. Raises RegularizerError before `attach` or inside another step."""
        if not self._attached:
            raise RegularizerError(
                f"{self._name} is not attached to a model; call attach(model, seed=..., total_steps=...)"
            )
        if self._inside:
            raise RegularizerError(f"step({t}) begins inside another step; a step's context must be left first")
        self._step, self._inside = t, True
        try:
            yield
        finally:
            self._inside = False

    def _check_state(
        self,
        state: Mapping[str, Tensor],
        expected: Mapping[str, tuple[int, ...]],
        *,
        whole: bool = False,
        source: str = "backbone and adapter that the checkpoint was written with",
    ) -> None:
        """Raise RegularizerError unless `state` has the names and shapes of `expected` and was drawn from the seed.

        whole: other tensors in `state` are refused, as in a single process; else they are those of other pipeline
        stages. source: which settings the shapes come from.
        """
        if not self._attached:
            raise RegularizerError(f"{self._name} is not attached to a model; attach before loading its state")
        whole = whole or self._placement is SINGLE_PROCESS
        different = set(expected) ^ set(state) if whole else set(expected) - set(state)
        if different:
            raise RegularizerError(
                f"the saved state does not belong to {self._name} on this model ({min(different)!r} is in only one of "
                "the two); resume with the regularizer, backbone and adapter that the checkpoint was written with"
            )
        for name, shape in expected.items():
            if tuple(state[name].shape) != tuple(shape):
                raise RegularizerError(
                    f"the saved state has {name} of shape {tuple(state[name].shape)} where this model has "
                    f"{tuple(shape)}; resume with the {source}"
                )
        seed = int(state.get(f"{self._prefix}seed", self._seed))
        if seed != self._seed:
            raise RegularizerError(
                f"the saved state was drawn from seed {seed}, this run from {self._seed}; resume with the same "
                "train.seed"
            )

    def state_dict(self) -> dict[str, Tensor]:
        """Return seed and step, the whole state of a method without a memory of its own."""
        return {f"{self._prefix}seed": torch.tensor(self._seed), f"{self._prefix}step": torch.tensor(self._step)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._check_state(state, {f"{self._prefix}seed": (), f"{self._prefix}step": ()})
        self._step = int(state[f"{self._prefix}step"])

    def detach(self) -> None:
        for layer in [layer for layer, owner in _HOOKED.items() if owner() is self]:
            del _HOOKED[layer]
        self._attached = self._inside = False
        self._placement = SINGLE_PROCESS
