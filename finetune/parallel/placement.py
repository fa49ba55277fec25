"""A rank's place in the mesh, in the words of `regularizers.mesh.Placement`."""

from __future__ import annotations

import torch
from torch import Tensor

from .layout import Layout, Slice, canonical
from .world import TOKENS, World


class MeshPlacement:
    """What `regularizers` may know of a `World` and a `Layout`."""

    def __init__(self, world: World, layout: Layout, *, gradient_scale: float) -> None:
        self._world, self._layout = world, layout
        self.gradient_scale = gradient_scale

    @property
    def device(self) -> torch.device:
        return self._world.device

    def rows(self, layer: str) -> Slice | None:
        return self._layout.slices.get(f"{canonical(layer)}.lora_B.weight")

    def columns(self, layer: str) -> Slice | None:
        return self._layout.slices.get(f"{canonical(layer)}.lora_A.weight")

    def sum_tensor(self, tensor: Tensor) -> None:
        self._world.sum(tensor, "tp")

    def sum_data(self, tensor: Tensor) -> None:
        self._world.sum(tensor, *TOKENS)

    def sum_pipeline(self, tensor: Tensor) -> None:
        self._world.sum(tensor, "pp")
