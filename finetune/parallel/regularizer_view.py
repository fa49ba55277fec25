"""A rank's place in the mesh, in the words of `regularizers.mesh.Placement`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..devices.capabilities import copied
from . import gather
from .layout import Layout, Slice, canonical
from .mesh import DATA, TOKENS, World


class MeshPlacement:
    """What `regularizers` may know of a `World` and a `Layout`."""

    def __init__(
        self, world: World, layout: Layout, parameters: Mapping[str, nn.Parameter], *, gradient_scale: float
    ) -> None:
        """`parameters`: this rank's trained ones by canonical name."""
        self._world, self._layout, self._parameters = world, layout, parameters
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

    @property
    def pipelined(self) -> bool:
        return self._world.width("pp") > 1

    @property
    def share(self) -> tuple[int, int]:
        return self._world.index(*DATA), self._world.width(*DATA)

    def squares(self, tensors: Mapping[str, Tensor]) -> Tensor:
        names = [canonical(name) for name in tensors]
        found = torch.stack(
            [t.detach().double().square().sum() for t in tensors.values()]
            or [torch.zeros((), dtype=torch.float64, device=self.device)]
        )
        sharded = [isinstance(self._parameters[name], DTensor) for name in names]
        cut = [name in self._layout.slices for name in names]
        for members, axes in ((sharded, ("dp", "cp")), (cut, ("tp",))):
            if any(members):
                index = copied(torch.tensor([i for i, member in enumerate(members) if member]), found.device)
                found[index] = self._world.sum(found[index], *axes)
        return found[: len(names)]

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        keys = {canonical(name): name for name in tensors}
        parts = {key: tensors[name] for key, name in keys.items()}
        like = {key: self._parameters[key] for key in keys}
        found = gather.whole_all(parts, like=like, layout=self._layout, world=self._world)
        return {keys[key]: tensor for key, tensor in found.items()}

    def take(self, wholes: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            key = canonical(name)
            whole = wholes[name].to(tensor.device)
            gather.put(tensor, whole, self._layout.slices.get(key), like=self._parameters[key])
