"""Cutting parameters: the whole one goes, a plain local one takes its place, on the meta device or on a real one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..layout import Layout, Slice, canonical


class Cutter:
    """Cuts parameters of `model` for the `rank`-th of `width` ranks and writes down what it cut."""

    def __init__(self, model: nn.Module, *, rank: int, width: int, device: torch.device) -> None:
        """
        Args:
            device: where the model will be, should its parameters be on meta yet.
        """
        self.rank = rank
        self.device = device
        self.width = width
        self.layout = Layout()
        self._holders: dict[int, list[tuple[nn.Module, str, str]]] = {}
        for prefix, module in model.named_modules():
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    name = canonical(f"{prefix}.{key}" if prefix else key)
                    self._holders.setdefault(id(parameter), []).append((module, key, name))
        self._cut: set[int] = set()

    def cut(self, parameter: Tensor, dim: int, *, fused: int = 1) -> None:
        """Put this rank's part of `parameter` along `dim` wherever the whole one was (tied weights stay tied)."""
        if id(parameter) in self._cut:
            return
        part = Slice.even(dim, parameter.shape[dim], rank=self.rank, width=self.width, fused=fused)
        shape = list(parameter.shape)
        shape[dim] //= self.width
        if parameter.is_meta:
            local = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
        else:
            local = part.take(parameter.detach()).clone()
        replacement = nn.Parameter(local, requires_grad=parameter.requires_grad)
        holders = self._holders.pop(id(parameter))
        for module, key, name in holders:
            module._parameters[key] = replacement
            self.layout.slices[name] = part
        self._holders[id(replacement)] = holders
        self._cut.add(id(replacement))

    def names(self, parameter: Tensor) -> list[str]:
        """Canonical names of `parameter`."""
        return [name for _, _, name in self._holders[id(parameter)]]

    def columns(self, layer: Any, *, fused: int = 1) -> None:
        """Keep this rank's output rows of a column layer: of the weight, the bias and every adapter's B."""
        base = _base(layer)
        self.cut(base.weight, 1 if _transposed(base) else 0, fused=fused)
        if base.bias is not None:
            self.cut(base.bias, 0, fused=fused)
        for up in getattr(layer, "lora_B", {}).values():
            self.cut(up.weight, 0, fused=fused)
            up.out_features //= self.width
        for down in getattr(layer, "lora_A", {}).values():
            self._partial(down.weight)
        _resize(layer, base, "nf" if _transposed(base) else "out_features", "out_features", self.width)

    def row(self, layer: Any) -> None:
        """Keep this rank's input columns of a row layer: of the weight and every adapter's A; the bias on rank 0."""
        base = _base(layer)
        self.cut(base.weight, 0 if _transposed(base) else 1)
        if base.bias is not None and self.rank:
            # Outputs are summed over the ranks and the bias belongs into the sum once. A plain attribute: neither a
            # parameter nor a buffer, so that nothing is read into it.
            device = self.device if base.bias.is_meta else base.bias.device
            zero = torch.zeros(base.bias.shape, dtype=base.bias.dtype, device=device)
            del base.bias
            base.bias = zero
        for down in getattr(layer, "lora_A", {}).values():
            self.cut(down.weight, 1)
            down.in_features //= self.width
        for up in getattr(layer, "lora_B", {}).values():
            self._partial(up.weight)
        _resize(layer, base, "nx" if _transposed(base) else "in_features", "in_features", self.width)

    def summed(self, module: nn.Module) -> None:
        """Trainable parameters of `module` that stayed whole get a summand of their gradient on each rank."""
        for parameter in module.parameters():
            if id(parameter) not in self._cut:
                self._partial(parameter)

    def _partial(self, parameter: nn.Parameter) -> None:
        if parameter.requires_grad:
            self.layout.partial.update(self.names(parameter))


def _base(layer: Any) -> Any:
    return layer.base_layer if hasattr(layer, "lora_A") else layer


def _transposed(base: nn.Module) -> bool:
    return type(base).__name__ == "Conv1D"


def _resize(layer: Any, base: Any, own: str, peft: str, width: int) -> None:
    setattr(base, own, getattr(base, own) // width)
    if layer is not base:
        setattr(layer, peft, getattr(layer, peft) // width)
