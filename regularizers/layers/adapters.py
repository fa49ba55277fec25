"""Trained LoRA factors of a PEFT model as one vector θ, perturbed and restored by the adapter-space methods.

θ holds A and B of every layer (embeddings included). Other trained parameters, such as a classifier's head, are not
part of it. On a mesh a process has its parts of θ; sums over θ go through the `Placement`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from flatshift.regularizers.config import RegularizerError
from flatshift.regularizers.layers.sharded import is_sharded
from flatshift.regularizers.layers.sites import canonical_name
from flatshift.regularizers.mesh import SINGLE_PROCESS, Placement

_FACTORS = (".lora_A.", ".lora_B.", ".lora_embedding_A.", ".lora_embedding_B.")


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this process's part of `tensor`, detached but sharing memory: writing to it writes to `tensor`."""
    detached: Any = tensor.detach()
    return detached.to_local() if is_sharded(detached) else detached  # type: ignore[no-any-return]


class AdapterParameters:
    """θ of one model. Methods that are collective on a mesh are marked as such."""

    def __init__(self, model: nn.Module, placement: Placement = SINGLE_PROCESS, *, heads: bool = False) -> None:
        """heads: θ also holds all other trained parameters. Raises RegularizerError if `model` trains no LoRA factor
        (on any pipeline stage), or if they are sharded without a placement."""
        self.placement = placement
        self.parameters: dict[str, nn.Parameter] = {
            canonical_name(name): parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and (heads or any(part in f".{name}." for part in _FACTORS))
        }
        """Parameters by name, in the model's order: `base_model.model.…q_proj.lora_A.default.weight`."""
        sharded = [name for name, parameter in self.parameters.items() if is_sharded(parameter)]
        if sharded and placement is SINGLE_PROCESS:
            raise RegularizerError(
                f"{sharded[0]} is sharded over processes, and its gradients are sums over them; give attach() the "
                "placement of this process in the mesh"
            )
        first = next(iter(self.parameters.values()), None)
        self.device = placement.device if first is None or placement is not SINGLE_PROCESS else first.device
        count = torch.tensor([len(self.parameters)], device=self.device)
        placement.sum_pipeline(count)
        if int(count) == 0:
            raise RegularizerError(
                "the model trains no LoRA factor; attach a LoRA adapter first (adapter.targets: all-linear), or load "
                "one with is_trainable=True"
            )

    def require_float32(self, change: str) -> None:
        """Raise RegularizerError if a factor is kept in fewer bits, which a small `change` does not reach."""
        narrow = next((name for name, p in self.parameters.items() if p.dtype.itemsize < 4), None)
        if narrow is not None:
            raise RegularizerError(
                f"{narrow} is kept in {self.parameters[narrow].dtype}, which rounds {change} away; keep the adapter in "
                "float32 (the backbone may stay as it is)"
            )

    def values(self) -> dict[str, Tensor]:
        """Return this process's parts of θ; writing to them writes to the model."""
        return {name: local_tensor(parameter) for name, parameter in self.parameters.items()}

    def gradients(self, loss_scale: float = 1.0) -> dict[str, Tensor]:
        """Return this process's parts of ∂L/∂θ ÷ `loss_scale` in float32 (float64 for float64); zero where there is
        none.

        Read-only: without a scale they may be the parameters' own gradients. Call after the loop has summed the
        gradients over the mesh, which our loop does at the end of a pass.
        """
        gradients = {}
        for name, parameter in self.parameters.items():
            value = local_tensor(parameter)
            dtype = torch.promote_types(value.dtype, torch.float32)
            if parameter.grad is None:
                gradients[name] = torch.zeros_like(value, dtype=dtype)
            else:
                gradient = local_tensor(parameter.grad).to(dtype)
                gradients[name] = gradient if loss_scale == 1 else gradient / loss_scale
        return gradients

    def squared_norm(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return |·|² over all of θ, float64 (); `tensors` have the layout of θ. Collective."""
        total = self.placement.squares(tensors).sum().to(self.device)
        self.placement.sum_pipeline(total)
        return total

    def zeros(self) -> dict[str, Tensor]:
        """Return a zero vector in θ's layout, in float32 (float64 for float64 factors)."""
        return {
            name: torch.zeros_like(value, dtype=torch.promote_types(value.dtype, torch.float32))
            for name, value in self.values().items()
        }

    @contextmanager
    def moved(self, direction: Mapping[str, Tensor], factor: Tensor | float = 1.0) -> Iterator[None]:
        """Move θ to θ + `factor` · `direction` inside the context; on exit, even by an exception, restore it bit for
        bit."""
        values = list(self.values().values())
        if not values:  # a pipeline stage without an adapter
            yield
            return
        before = [torch.empty_like(value) for value in values]
        with torch.no_grad():
            torch._foreach_copy_(before, values)
        try:
            with torch.no_grad():
                _add_scaled(values, [direction[name] for name in self.parameters], factor)
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(list(self.values().values()), before)


def _add_scaled(values: list[Tensor], steps: list[Tensor], factor: Tensor | float) -> None:
    """Add `factor` · `steps` to `values` in place, in a few launches on CUDA."""
    # A factor of another dtype would make CUDA fall back to a launch for each tensor.
    moves = torch._foreach_mul(steps, factor.to(steps[0]) if isinstance(factor, Tensor) else factor)
    torch._foreach_add_(values, [move.to(value) for move, value in zip(moves, values, strict=True)])
