"""ZeRO by FSDP2: each block is a unit whose weights are sharded over N ranks and gathered while it computes.

The units are the transformer blocks with their adapters, the embedding and the head, and the rest of a model as its
root. Where ranks share experts (`mesh.ep`), a block's experts are a unit of their own over fewer ranks. Weights shared
by several modules stay in the root, the only unit that is gathered whenever any of them is used, or are split by tokens
(`flatshift.finetune.parallel.tensor.apply.split_tied_vocabulary`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard

from ..compute.capabilities import capabilities
from ..config import MESH_AXES, Mesh
from ..errors import UserError
from ..models.anatomy import called_modules, routed_experts, transformer_blocks
from ..models.checkpoint import canonical_name
from .layout import local_part
from .mesh import EXPERT_SHARDS, SHARDS, ProcessMesh

# A first dim that does not divide is still sharded if it is this many times the ranks: the remainder is negligible.
_LONG = 64


@dataclass(frozen=True)
class Sharding:
    """FSDP2's shards of a model.

    units: its modules.
    reduced: canonical names of the trainable parameters whose gradients FSDP2 reduces (the *mean* over `group`
        ranks).
    group: ranks over which those gradients are averaged; 1 if there are none.
    whole_bytes: bytes of all parameters without sharding (but sliced by tp, pp and tokens).
    sharded_bytes: bytes of the sharded ones among them.
    local_bytes: bytes of all parameters on this rank.
    reduces_always: True if gradients are reduced in every micro-batch (ZeRO-2).
    """

    units: tuple[FSDPModule, ...]
    reduced: frozenset[str]
    group: int
    whole_bytes: int
    sharded_bytes: int
    local_bytes: int
    reduces_always: bool

    def set_sync(self, *, last: bool) -> None:
        """Set gradient reduction for the next backward pass: in the step's last micro-batch, or always for ZeRO-2."""
        for unit in self.units:
            unit.set_requires_gradient_sync(last or self.reduces_always, recurse=False)
            unit.set_requires_all_reduce(last, recurse=False)

    def reshard(self) -> None:
        """Free weights that are still gathered, as after a forward pass without backward and `mesh.reshard: false`."""
        for unit in self.units:
            unit.reshard()


def shard(model: nn.Module, *, mesh: Mesh, world: ProcessMesh) -> Sharding:
    """Shard `model` in place over dp (and ep and cp), with copies along replicate; a no-op if these are 1.

    model: on meta or real; a module with the children `part0`, `part1`, … is sharded part by part.

    Raises UserError for settings that shard nothing or need CUDA, RuntimeError if FSDP2 left something unsharded.
    """
    parameters = list(model.parameters())
    whole_bytes = sum(p.nbytes for p in parameters)
    if world.width(*SHARDS) == 1:
        return Sharding((), frozenset(), 1, whole_bytes, 0, whole_bytes, False)
    if mesh.offload and not capabilities(world.device).pinned:
        raise UserError("mesh.offload keeps shards in host memory, which needs a CUDA device; leave it out on the CPU")
    if mesh.zero < 3 and mesh.adapters == "replicate":
        raise UserError(f"mesh.zero {mesh.zero} shards nothing but adapters; take mesh.adapters: shard, or mesh.zero 3")
    ignored = {p for p in parameters if (mesh.adapters == "replicate" if p.requires_grad else mesh.zero < 3)}
    for module in model.modules():
        if getattr(getattr(module, "vocabulary", None), "rows_differ", False):  # slices along these axes already
            ignored.update(module.parameters(recurse=False))
    # gradients are reduced in float32 in any case; weights are used in their own dtype
    narrow = any(p.requires_grad and p.dtype != torch.float32 for p in parameters)
    options: dict[str, Any] = {
        "mesh": _fsdp_mesh(world, SHARDS),
        "reshard_after_forward": mesh.reshards,
        "shard_placement_fn": partial(_placement, world.width(*SHARDS)),
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32) if narrow else MixedPrecisionPolicy(),
        "offload_policy": CPUOffloadPolicy() if mesh.offload else OffloadPolicy(),
        "ignored_params": ignored,
    }
    unit_count = 0
    for root in called_modules(model):
        if world.width("ep") > 1:
            unit_count += _shard_experts(root, ignored, options, world)
        units = _find_units(root, ignored)
        for unit in [*units, root]:
            fully_shard(unit, **options)
        unit_count += len(units) + 1
        if capabilities(world.device).kind == "cuda":
            set_prefetch(sort_by_forward_order(root, units))
        if hasattr(root, "generate"):  # it calls parts, not the root, whose weights it needs gathered
            register_fsdp_forward_method(root, "generate")
    fsdp_units = tuple(module for module in model.modules() if isinstance(module, FSDPModule))
    sharded = {canonical_name(name): p for name, p in model.named_parameters()}
    plain = [name for name, p in sharded.items() if not isinstance(p, DTensor) and p not in ignored]
    if len(fsdp_units) != unit_count or plain:
        raise RuntimeError(
            f"silently unsharded: {len(fsdp_units)} of {unit_count} units were made, {len(plain)} parameters were left "
            f"whole{f', the first {plain[0]}' if plain else ''}"
        )
    reduced = frozenset(n for n, p in sharded.items() if p.requires_grad and isinstance(p, DTensor))
    return Sharding(
        fsdp_units,
        reduced,
        world.width("replicate", *SHARDS) if reduced else 1,
        whole_bytes,
        sum(p.numel() * p.itemsize for p in model.parameters() if isinstance(p, DTensor)),
        sum(local_part(p).nbytes for p in model.parameters()),
        mesh.zero == 2,
    )


def _shard_experts(root: nn.Module, ignored: set[nn.Parameter], options: dict[str, Any], world: ProcessMesh) -> int:
    """Shard the experts of this rank over the ranks that have the same, and return the number of units; without such
    ranks they are added to `ignored`."""
    width = world.width(*EXPERT_SHARDS)
    experts = [module for module in routed_experts(root).values() if any(p not in ignored for p in module.parameters())]
    if width == 1:
        ignored.update(parameter for module in experts for parameter in module.parameters())
        return 0
    placement = partial(_placement, width)
    for module in experts:
        fully_shard(module, **options | {"mesh": _fsdp_mesh(world, EXPERT_SHARDS), "shard_placement_fn": placement})
    return len(experts)


def _find_units(root: nn.Module, ignored: set[nn.Parameter]) -> list[nn.Module]:
    """Return the blocks, embedding and head that have something to shard and share no weight with modules outside of
    them."""
    owners = Counter(id(p) for module in root.modules() for p in module._parameters.values() if p is not None)
    units = []
    for module in [*transformer_blocks(root), *_find_embedding_and_head(root)]:
        own = Counter(id(p) for m in module.modules() for p in m._parameters.values() if p is not None)
        if any(p not in ignored for p in module.parameters()) and own.items() <= owners.items() and module not in units:
            units.append(module)
    return units


def sort_by_forward_order(root: nn.Module, units: list[nn.Module]) -> list[nn.Module]:
    """Return `units` in the order of a forward pass: the embedding, the blocks, the head."""
    blocks = set(transformer_blocks(root))
    head = {id(end) for end in _find_embedding_and_head(root, "get_output_embeddings")}
    return sorted(units, key=lambda unit: 1 if unit in blocks else 2 if id(unit) in head else 0)


def set_prefetch(units: list[Any]) -> None:
    """Make each unit prefetch the next one's weights before it computes, forward and backward.

    FSDP2 gathers on its own stream, but by default starts a gather when the host reaches the unit; if the host is slow
    to queue short kernels, the device then waits. Prefetching keeps one more unit gathered.
    """
    for unit, after in itertools.pairwise(units):
        unit.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([unit])


def _find_embedding_and_head(root: nn.Module, *getters: str) -> list[nn.Module]:
    """Return the input embedding and the output head (or the modules that `getters` return), if the model has them."""
    model = getattr(root, "get_base_model", lambda: root)()
    ends = []
    for getter in getters or ("get_input_embeddings", "get_output_embeddings"):
        with suppress(AttributeError, NotImplementedError):  # a model without tokens, a stage without the embedding
            ends.append(getattr(model, getter)())
    return [end for end in ends if isinstance(end, nn.Module)]


def _fsdp_mesh(world: ProcessMesh, axes: tuple[str, ...]) -> DeviceMesh:
    """Return the one-dimensional mesh over `axes`, or with replicate as first dim (HSDP)."""
    inner = [axis for axis in axes if world.width(axis) > 1]
    if world.width("replicate") == 1:
        return world.flat(*inner)
    if len(inner) == 1:
        return world.submesh("replicate", *inner)
    assert world.mesh is not None
    outer = [axis for axis in MESH_AXES if axis not in ("replicate", *axes)]
    order = [MESH_AXES.index(axis) for axis in (*outer, "replicate", *axes)]
    ranks = world.mesh.mesh.reshape([world.width(axis) for axis in MESH_AXES])
    ranks = ranks.permute(order)[tuple(world.index(axis) for axis in outer)].flatten(1)
    groups = [world.group("replicate"), world.group(*inner)]
    return DeviceMesh.from_group(groups, world.device.type, mesh=ranks, mesh_dim_names=("replicate", "_".join(inner)))


def _placement(width: int, parameter: nn.Parameter) -> Shard | None:
    """Shard the first dim, unless it is short and does not divide and a later one does (A with r below the ranks)."""
    if parameter.ndim == 0 or parameter.shape[0] % width == 0 or parameter.shape[0] >= _LONG * width:
        return None
    return next((Shard(dim) for dim, size in enumerate(parameter.shape) if size and size % width == 0), None)
